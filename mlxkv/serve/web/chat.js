// The conversation: asks, shows what streams in, and says what each answer cost.

import { ApiError, events } from "./api.js";
import { copyButton, count, el, percent, prose, seconds } from "./format.js";

const KEPT = "mlxkv.chat";
const $ = (id) => document.getElementById(id);

const REASONS = {
  empty: "nothing is stored from here on",
  different_tokens: "what is stored goes on with other words",
  no_state: "no state is stored to go on from",
  evicted: "it was removed to make room",
  corrupt: "a record was damaged",
  io_error: "a record could not be read",
  other_model: "it is stored for another model",
  other_layout: "it is stored with another layout",
  other_numerics: "it is stored under other numerics",
  pending: "it was still being written",
  off: "the prefix store is off",
};

export const why = (reason) => REASONS[reason] ?? reason;

/** What an answer cost, in words. `usage` and `mlxkv` as the last chunks of a stream have them. */
export function cost(usage, extension) {
  const made = [];
  const timings = extension?.timings;
  if (usage) made.push(`${count(usage.completion_tokens)} tokens`);
  if (timings?.decode_tps > 0) made.push(`${timings.decode_tps.toFixed(1)} tokens/s`);
  if (timings) made.push(`first after ${seconds(timings.ttft_s)}`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const from = { ram: " from RAM", ssd: " from SSD", legacy: " from a legacy folder", object: " from the object store" }[extension?.cache?.source] ?? "";
    made.push(cached ? `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens${from} (${percent(cached, usage.prompt_tokens)})` : `none of ${count(usage.prompt_tokens)} prompt tokens from the store`);
    const miss = extension?.cache?.miss_reason;
    if (miss) made.push(`from token ${count(extension.cache.miss_position)} on: ${why(miss)}`);
  }
  return made;
}

export class Chat {
  /** `model()` names the one to ask; `changed()` is told when an answer has ended. */
  constructor(model, changed) {
    this.model = model;
    this.changed = changed;
    this.turns = []; // {role, content, reasoning?, note?, error?}
    this.running = null; // {controller, id, began}
    this.follow = true;
    this.restore();
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("prompt").addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    const box = $("messages");
    box.addEventListener("scroll", () => {
      this.follow = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    });
  }

  /** The messages as they would be asked, with what stands in the box now if `draft`. */
  messages(draft = false) {
    const system = $("system").value.trim();
    const made = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "user" || turn.content) made.push({ role: turn.role, content: turn.content });
    }
    const text = $("prompt").value.trim();
    if (draft && text) made.push({ role: "user", content: text });
    return made;
  }

  clear() {
    this.stop();
    this.turns = [];
    $("log").replaceChildren();
    $("welcome").hidden = false;
    this.keep();
    $("prompt").focus();
  }

  stop() {
    this.running?.controller.abort();
  }

  async send() {
    const text = $("prompt").value.trim();
    if (this.running || !text) return;
    $("prompt").value = "";
    this.fit();
    this.add({ role: "user", content: text });
    await this.answer();
  }

  async again() {
    if (this.running) return;
    if (this.turns.at(-1)?.role === "assistant") {
      this.turns.pop();
      $("log").lastElementChild.remove();
    }
    await this.answer();
  }

  async answer() {
    const body = { model: this.model(), messages: this.messages(), stream: true, stream_options: { include_usage: true } };
    const temperature = $("temperature").value;
    if (temperature !== "") body.temperature = Number(temperature);
    const longest = $("max-tokens").value;
    if (longest !== "") body.max_tokens = Number(longest);
    if ($("thinking").value) body.reasoning_effort = $("thinking").value;

    const turn = { role: "assistant", content: "" };
    const view = this.add(turn, true);
    const began = performance.now();
    const running = (this.running = { controller: new AbortController(), id: null, began, view });
    this.busy(true);
    view.item.setAttribute("aria-busy", "true");
    let usage = null;
    let extension = null;
    let finish = null;
    const draw = later(() => this.draw(turn, view));
    view.wait(began);
    try {
      for await (const chunk of events("v1/chat/completions", body, running.controller.signal)) {
        running.id ??= chunk.id;
        usage = chunk.usage ?? usage;
        extension = chunk.mlxkv ?? extension;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        const delta = choice.delta ?? {};
        if (delta.content) turn.content += delta.content;
        if (delta.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + delta.reasoning_content;
        finish = choice.finish_reason ?? finish;
        if (delta.content || delta.reasoning_content) draw();
      }
      turn.note = cost(usage, extension);
      if (finish === "length") turn.note.unshift("cut at the longest length");
      $("announce").textContent = "The answer is there.";
    } catch (error) {
      if (error.name === "AbortError") {
        turn.note = [`stopped after ${seconds((performance.now() - began) / 1000)}`];
        $("announce").textContent = "Stopped.";
      } else {
        turn.error = error instanceof ApiError ? error.message : `This page failed: ${error.message}`;
      }
    } finally {
      this.running = null;
      view.pending = false;
      draw.now();
      view.item.removeAttribute("aria-busy");
      this.busy(false);
      this.keep();
      this.changed();
    }
  }

  busy(on) {
    $("stop").hidden = !on;
    $("send").hidden = on;
    if (on) $("announce").textContent = "The model is at it.";
    else $("prompt").focus({ preventScroll: true });
  }

  /** Show a turn. Returns its elements. pending: its answer is still to come. */
  add(turn, pending = false) {
    this.turns.push(turn);
    $("welcome").hidden = true;
    const name = turn.role === "user" ? "You" : "Model";
    const wait = el("p.wait", { hidden: true });
    const view = { pending, body: el("div.body", { tabIndex: turn.content.length > 1000 ? 0 : -1 }), foot: el("div.foot"), thought: null };
    view.item = el(`li.turn.${turn.role}`, {}, el("h3.who", {}, name), wait, view.body, view.foot);
    let timer = null;
    view.wait = (began) => {
      const tell = () => {
        const progress = view.progress ? ` ${count(view.progress.done_tokens)} of ${count(view.progress.prompt_tokens)} tokens,` : "";
        wait.textContent = `Reading the prompt…${progress} ${Math.floor((performance.now() - began) / 1000)} s`;
      };
      wait.hidden = false;
      tell();
      timer = setInterval(tell, 500);
    };
    view.waited = () => {
      clearInterval(timer);
      wait.hidden = true;
    };
    $("log").append(view.item);
    this.draw(turn, view);
    if (turn.role === "user") this.follow = true;
    this.scroll();
    return view;
  }

  /** Tell how far the prompt of the answer that is waited for has been read. */
  progress(rows) {
    const running = this.running;
    // the engine may call each choice of a request by its id and a number
    const mine = running?.id && rows.find((row) => row.id.startsWith(running.id));
    if (mine && mine.prompt_tokens) running.view.progress = mine;
  }

  draw(turn, view) {
    const pending = view.pending;
    if (turn.content || turn.reasoning || !pending) view.waited();
    if (turn.role === "user") {
      view.body.textContent = turn.content;
    } else {
      if (turn.reasoning) {
        if (!view.thought) {
          view.text = el("div.prose");
          view.thought = el("details.thought", { open: pending }, el("summary", {}, "Thinking"), view.text);
        }
        view.text.textContent = turn.reasoning.trim();
        if (turn.content && !view.folded) {
          view.folded = true;
          view.thought.open = false;
        }
      }
      view.body.replaceChildren(...(view.thought ? [view.thought] : []), prose(turn.content));
      if (!pending && !turn.content && !turn.error) view.body.append(el("p.none", {}, "No text."));
    }
    view.foot.replaceChildren();
    if (turn.error) view.foot.append(el("p.error", { role: "alert" }, turn.error));
    if (!pending && turn.role === "assistant") {
      const last = this.turns.at(-1) === turn;
      document.querySelectorAll(".again").forEach((old) => old.remove());
      view.foot.append(
        el("p.note", {}, ...(turn.note ?? []).map((part) => el("span", {}, part))),
        el("p.acts", {}, turn.content ? copyButton(() => turn.content) : null, last ? el("button.quiet.small.again", { type: "button", onclick: () => this.again() }, "Try again") : null),
      );
    }
    this.scroll();
  }

  scroll() {
    if (this.follow) $("messages").scrollTop = $("messages").scrollHeight;
  }

  /** The box is as high as its text, up to a third of the window. */
  fit() {
    const box = $("prompt");
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, window.innerHeight / 3)}px`;
  }

  keep() {
    const settings = Object.fromEntries(["system", "temperature", "max-tokens", "thinking"].map((id) => [id, $(id).value]));
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ turns: this.turns, settings }));
    } catch {
      // too much to keep: then a reload begins anew
    }
  }

  restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
      for (const [id, value] of Object.entries(kept.settings ?? {})) $(id).value = value;
      for (const turn of kept.turns ?? []) this.add(turn);
    } catch {
      sessionStorage.removeItem(KEPT);
    }
  }
}

/** `draw` at most once a frame; `.now()` at once. */
function later(draw) {
  let frame = null;
  const asked = () => {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      draw();
    });
  };
  asked.now = () => {
    cancelAnimationFrame(frame);
    frame = null;
    draw();
  };
  return asked;
}
