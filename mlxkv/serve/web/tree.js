// What the prefix store remembers: stretches of prompts that branch, and the places where a request can go on.

import { json } from "./api.js";
import { why } from "./chat.js";
import { count, el, seconds, size } from "./format.js";

const $ = (id) => document.getElementById(id);
/** keys of stretches that were folded by hand */
const folded = new Set();
let shown = "";

export async function showTree(model) {
  const query = new URLSearchParams({ limit: "150" });
  if (model) query.set("model", model);
  const found = await json(`v1/cache/tree?${query}`, { quiet: true });
  const now = Date.now() / 1000;
  const same = JSON.stringify(found);
  if (same === shown && !found.stretches.some((s) => now - (s.used ?? 0) < 30)) return;
  shown = same;
  if (found.off) return $("tree").replaceChildren(el("p.small", {}, `Nothing: ${found.off}.`));
  const children = new Map();
  found.stretches.forEach((stretch, number) => {
    stretch.number = number;
    if (!children.has(stretch.above)) children.set(stretch.above, []);
    children.get(stretch.above).push(stretch);
  });
  found.latest = Math.max(0, ...found.stretches.map((s) => s.used ?? 0));
  const longest = Math.max(1, ...found.stretches.map((s) => s.end));
  const list = (above) => el("ul", {}, ...(children.get(above) ?? []).map((s) => el("li", {}, node(s, found, longest, now, children.has(s.number) ? list(s.number) : null))));
  const folder = found.folder;
  const others = folder.models.filter((m) => m.model !== found.model);
  const told = [`${count(found.entries)} entries; the folder has ${size(folder.bytes)}${folder.budget ? ` of at most ${size(folder.budget)}` : ""}`];
  if (others.length) told.push(`other models: ${others.map((m) => `${m.model || "unknown"} ${size(m.bytes)}`).join(", ")}`);
  if (found.left_out) told.push(`${count(found.left_out)} entries are not shown`);
  const focused = document.activeElement?.dataset?.key;
  $("tree").replaceChildren(found.stretches.length ? list(null) : el("p.small", {}, "Nothing yet. Ask something."), el("p.small", {}, `${told.join("; ")}.`));
  if (focused) $("tree").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function node(s, found, longest, now, below) {
  const key = s.key ?? `${s.above}-${s.start}`;
  const recent = s.used && s.used > found.latest - 0.5 && now - s.used < 60;
  const row = el(`span.node${recent ? ".fresh" : ""}`, {}, text(s), el("span.facts", {}, ...facts(s, found, now)), track(s, found, longest));
  if (!below) return el("div.leaf", {}, row);
  const summary = el("summary", { "data-key": key }, row);
  const details = el("details", { open: !folded.has(key) }, summary, below);
  details.addEventListener("toggle", () => (details.open ? folded.delete(key) : folded.add(key)));
  return details;
}

function text(s) {
  const said = s.text ?? "";
  if (!said) return el("span.said.dim", {}, s.key ?? "shared beginning");
  // marks of a template are set apart, so that the words can be read
  const words = said.replace(/(?:<\|[^<>|]{1,30}\|>\s*)+/g, " ⁝ ").replace(/\s+/g, " ").trim();
  return el("span.said", { title: said }, words.replace(/^⁝ /, "") || "(white space)");
}

function facts(s, found, now) {
  const made = [`tokens ${count(s.start)}–${count(s.end)}`];
  if (s.entries === 0) made.push("in common");
  const states = s.states.length;
  if (found.needs_state) made.push(states ? `${count(states)} ${states === 1 ? "place" : "places"} to go on from` : "no place to go on from");
  else made.push("goes on from anywhere");
  if (s.bytes.ssd) made.push(`${size(s.bytes.ssd)} on SSD`);
  if (s.bytes.ram) made.push(`${size(s.bytes.ram)} in RAM`);
  if (s.used) made.push(now - s.used < 5 ? "used just now" : `used ${seconds(Math.max(10, now - s.used))} ago`);
  return made.map((fact) => el("span", {}, fact));
}

/** The tokens from the first on, as a line; what is this stretch's own is drawn thick, with a mark at each state. */
function track(s, found, longest) {
  const line = el("span.track", { "aria-hidden": "true" });
  const own = el("span.own");
  const at = (position) => `${(100 * position) / longest}%`;
  own.style.left = at(s.start);
  own.style.width = at(Math.max(s.end - s.start, longest / 200));
  line.append(own);
  for (const state of s.states) {
    const kind = state.tiers.length > 1 ? "both" : state.tiers[0];
    const mark = el(`span.tick.${kind}`, { title: `${count(state.at)}: ${state.tiers.join(" and ").toUpperCase()}` });
    mark.style.left = at(state.at);
    line.append(mark);
  }
  return line;
}

/** Say what a prompt would find. */
export async function explain(model, messages) {
  const out = $("explained");
  if (!messages.length) return out.replaceChildren(el("p.small", {}, "Write a message first."));
  const body = { messages };
  if (model) body.model = model;
  try {
    const found = await json("v1/cache/explain", { body });
    const made = [el("p", {}, el("b", {}, `${count(found.cached_tokens)} of ${count(found.prompt_tokens)} tokens`), found.source === "none" ? " would be restored." : ` would be restored from ${found.source.toUpperCase()}.`)];
    if (found.miss_reason) made.push(el("p.small", {}, `From token ${count(found.miss_position)} on: ${why(found.miss_reason)}.`));
    if (found.miss_reason === "different_tokens" || found.stored_text) {
      made.push(
        el("dl.pairs", {}, ...[["the same up to", found.same_text_before], ["then you ask", found.asked_text], ["and stored is", found.stored_text ?? "(not shown)"]].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("code", {}, value))))),
      );
    }
    out.replaceChildren(...made);
  } catch (error) {
    out.replaceChildren(el("p.error", {}, error.message));
  }
}
