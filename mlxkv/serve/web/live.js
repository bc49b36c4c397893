// The live view: what the engine does and what the store gave. Asked once a second while somebody looks.

import { json } from "./api.js";
import { why } from "./chat.js";
import { bar, count, el, fill, pairs, percent, seconds, size } from "./format.js";

const $ = (id) => document.getElementById(id);

const MEMORY = { weights: "weights", caches: "live caches", joins: "joins", snapshots: "states to be written", restores: "restores", queue: "queue", ram: "prefixes in RAM" };
const APIS = { "/v1/chat/completions": "chat", "/v1/completions": "text", "/v1/responses": "responses", "/v1/messages": "messages" };
const STATES = { waiting: "waiting", prefilling: "reading", decoding: "decoding", leaving: "no longer wanted" };

/** Of `/v1/status`, the model that `name` is, or the first that is loaded. */
export const modelOf = (status, name) => status.models.find((model) => model.name === name && model.engine) ?? status.models.find((model) => model.engine) ?? null;

export function showStatus(status, name) {
  const model = modelOf(status, name);
  fill($("engine-about"), ...about(model));
  const engine = model?.engine;
  $("engine-numbers").hidden = !engine;
  if (engine) {
    fill(
      $("engine-numbers"),
      ...pairs([
        ["decoding", count(engine.running)],
        ["reading prompts", count(engine.prefilling + engine.restoring)],
        ["waiting", count(engine.waiting + engine.queued)],
        engine.step_s > 0 ? ["steps", `${count(engine.steps)}`, `${(engine.steps / engine.step_s).toFixed(1)} a second while it decodes`] : null,
        engine.drafted ? ["drafts kept", percent(engine.accepted, engine.drafted), `${count(engine.accepted)} of ${count(engine.drafted)} tokens that were proposed`] : null,
        ["answered", count(Object.entries(status.totals.requests).reduce((sum, [finish, n]) => sum + (["error", "cancelled"].includes(finish) ? 0 : n), 0))],
        ["up", seconds(status.uptime_s)],
      ]),
    );
    showMemory(engine);
    showStore(engine.store, model.info);
  }
  showRunning(engine?.rows ?? []);
  showTotals(status.totals);
  showRecent(status.recent);
}

function about(model) {
  if (!model) return ["No model is loaded; it will be when it is asked for something."];
  const info = model.info;
  const made = [el("b", {}, model.name), ` · ${info.dtype} on ${info.device} · ${info.layout}`];
  if (info.context_length) made.push(` · ${count(info.context_length)} tokens of context`);
  if (info.drafter) made.push(` · drafts: ${info.drafter}`);
  if (model.health !== "ok") made.push(el("span.error", {}, ` It cannot answer: ${model.health}.`));
  return made;
}

function showMemory(engine) {
  const parts = Object.entries(engine.memory).map(([entry, bytes]) => ({ name: MEMORY[entry] ?? entry, value: bytes, text: size(bytes), kind: `m-${entry}` }));
  const used = parts.reduce((sum, part) => sum + part.value, 0);
  const filled = el("span");
  filled.style.width = `${Math.min(100, (100 * used) / Math.max(1, engine.memory_limit))}%`;
  fill($("memory"), ...bar(parts, used, "Memory"), el("div.whole", { "aria-hidden": "true" }, filled), el("p.small", {}, `${size(used)} of the ${size(engine.memory_limit)} that it may take`));
}

function showStore(store, info) {
  const off = !store;
  fill($("store-about"), off ? `Off: ${info.store_off ?? "nothing is kept"}.` : store.stopped ? el("span.error", {}, `Nothing is written any more: ${store.stopped}`) : info.disk_off ? `In RAM only: ${info.disk_off}` : "On: prompts and answers are remembered up to exact positions.");
  $("store-numbers").hidden = off;
  if (off) return;
  const read = store.read_bytes;
  const faults = Object.values(store.faults).reduce((sum, n) => sum + n, 0);
  fill(
    $("store-numbers"),
    ...pairs([
      ["written", size(store.written_bytes), "to SSD since the start"],
      ["read from RAM", size(read.ram ?? 0)],
      ["read from SSD", size(read.ssd ?? 0)],
      ["in RAM", `${size(store.ram_bytes)}`, `of at most ${size(store.ram_budget)}`],
      ["to be written", size(store.waiting_bytes), `${count(store.waiting_tips)} states wait until it is worth while`],
      ["given up", size(store.evicted_bytes), `${count(store.evicted_records)} records, to make room`],
      faults ? ["faults", count(faults), Object.entries(store.faults).map(([kind, n]) => `${kind}: ${n}`).join(", ")] : null,
    ]),
  );
}

function showTotals(totals) {
  const hit = totals.hit_tokens;
  const names = { ram: "from RAM", ssd: "from SSD", object: "from the object store", legacy: "from legacy folders" };
  const parts = Object.entries(names).map(([tier, name]) => ({ name, value: hit[tier] ?? 0, kind: `t-${tier}`, text: count(hit[tier] ?? 0) }));
  const computed = totals.prompt_tokens - totals.cached_tokens;
  parts.push({ name: "computed", value: computed, kind: "t-none", text: count(computed) });
  const note = totals.prompt_tokens ? `${percent(totals.cached_tokens, totals.prompt_tokens)} of ${count(totals.prompt_tokens)} prompt tokens did not have to be computed.` : "No prompt yet.";
  fill($("hits"), ...(totals.prompt_tokens ? bar(parts, totals.prompt_tokens, "Prompt tokens") : []), el("p.small", {}, note));
  const reasons = Object.entries(totals.misses).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, ...reasons.map(([, n]) => n));
  const whole = Object.values(totals.lookups).reduce((sum, n) => sum + n, 0) - reasons.reduce((sum, [reason, n]) => sum + (reason === "off" ? 0 : n), 0);
  const rows = reasons.map(([reason, n]) => {
    const meter = el("span.meter", { "aria-hidden": "true" });
    meter.style.width = `${(100 * n) / most}%`;
    return el("tr", {}, el("td", {}, el("code", {}, reason), el("span.dim", {}, ` ${why(reason)}`), meter), el("td.n", {}, count(n)), el("td.n", {}, count(totals.missed_tokens[reason] ?? 0)));
  });
  fill(
    $("misses"),
    rows.length ? el("table.reasons", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "why"), el("th.n", { scope: "col" }, "prompts"), el("th.n", { scope: "col" }, "tokens"))), el("tbody", {}, ...rows)) : "",
    el("p.small", {}, whole > 0 ? `${count(whole)} ${whole === 1 ? "prompt was" : "prompts were"} there to the last token but one.` : rows.length ? "" : "No prompt has missed anything."),
  );
}

function showRunning(rows) {
  if (!rows.length) return fill($("running"), el("p.small", {}, "Nothing."));
  const shown = rows.map((row) => {
    const known = row.prompt_tokens !== null;
    const done = el("progress", { max: Math.max(1, row.prompt_tokens ?? 1), value: row.done_tokens, "aria-label": "prompt read" });
    return el(
      "tr",
      { title: row.id },
      el("td", {}, STATES[row.state] ?? row.state),
      el("td", {}, known ? done : null, el("span.dim", {}, known ? ` ${count(row.done_tokens)} of ${count(row.prompt_tokens)}` : "–")),
      el("td.n", {}, count(row.cached_tokens)),
      el("td.n", {}, count(row.generated_tokens)),
      el("td.n", {}, row.context_left === null ? "–" : count(row.context_left)),
      el("td.n", {}, seconds(row.age_s)),
    );
  });
  const head = ["state", "prompt", "restored", "answer", "context left", "age"].map((name, i) => el(i > 1 ? "th.n" : "th", { scope: "col" }, name));
  fill($("running"), el("div.scroll", {}, el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...shown))));
}

function showRecent(recent) {
  if (!recent.length) return fill($("recent"), el("p.small", {}, "None yet."));
  const names = [["time"], ["API"], ["prompt", 1], ["restored"], ["why not more"], ["answer", 1], ["first token", 1], ["tokens/s", 1], ["end"]];
  const head = names.map(([name, n]) => el(n ? "th.n" : "th", { scope: "col" }, name));
  const rows = recent.slice(0, 20).map((r) => {
    const known = r.prompt_tokens !== undefined;
    const strip = known ? el("span.share", { title: `${count(r.cached_tokens)} of ${count(r.prompt_tokens)} from ${r.source}` }, el(`span.t-${r.source}`)) : null;
    if (strip) strip.firstChild.style.width = `${(100 * r.cached_tokens) / Math.max(1, r.prompt_tokens)}%`;
    const bad = r.error || r.status >= 400;
    return el(
      "tr",
      { title: r.id },
      el("td", {}, new Date(r.ended * 1000).toLocaleTimeString([], { hour12: false })),
      el("td", { title: r.route }, APIS[r.route] ?? r.route),
      el("td.n", {}, known ? count(r.prompt_tokens) : "–"),
      el("td", {}, strip, known ? ` ${count(r.cached_tokens)}` : "–"),
      el("td", {}, r.miss_reason ? el("code", { title: why(r.miss_reason) }, `${r.miss_reason}@${r.miss_position}`) : known ? "all there" : "–"),
      el("td.n", {}, known ? count(r.completion_tokens) : "–"),
      el("td.n", {}, known && r.completion_tokens ? seconds(r.ttft_s) : "–"),
      el("td.n", {}, known && r.tps > 0 ? r.tps.toFixed(1) : "–"),
      el(bad ? "td.bad" : "td", {}, r.error ?? (bad ? `left (${r.status})` : r.finish)),
    );
  });
  fill($("recent"), el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

export const status = () => json("v1/status", { quiet: true });
