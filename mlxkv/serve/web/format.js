// From values to what a person reads. Nothing here puts a text into the page as markup.

/** An element: `el("p.note", {title: "…"}, "text", child, …)`. */
export function el(spec, properties = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (bytes >= 999.5 && at < units.length - 1) {
    bytes /= 1000;
    at += 1;
  }
  return `${at === 0 || bytes >= 99.5 ? Math.round(bytes) : bytes.toFixed(1)} ${units[at]}`;
}

export function seconds(s) {
  if (s < 0.0995) return `${Math.max(1, Math.round(s * 1000))} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} days`;
}

export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");

/** The text of an answer as elements: fenced code, `code` and **strong**; all else as it is. */
export function prose(text) {
  const out = document.createDocumentFragment();
  const parts = text.split(/^[ \t]*```([^\n`]*)(?:\n|$)/m);
  // even parts are outside of a fence; an odd one is what follows the fence's marks
  let code = false;
  for (let i = 0; i < parts.length; i += 2) {
    const part = parts[i];
    const language = i > 0 ? parts[i - 1].trim() : "";
    if (code) {
      const block = el("code", {}, part.replace(/\n$/, ""));
      out.append(el("figure.code", {}, el("figcaption", {}, language || "code", copyButton(() => block.textContent)), el("pre", { tabIndex: 0 }, block)));
    } else if (part.trim()) {
      out.append(el("div.prose", {}, ...inline(part.replace(/^\n+|\s+$/g, ""))));
    }
    code = !code;
  }
  return out;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((piece) => {
    if (/^`.+`$/.test(piece)) return el("code", {}, piece.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(piece)) return el("strong", {}, piece.slice(2, -2));
    return piece;
  });
}

export function copyButton(text) {
  const button = el("button.quiet.small", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** A bar of parts: `[{name, value, kind, text}]` of `all`; its legend says each in words. */
export function bar(parts, all, label) {
  const shown = parts.filter((part) => part.value > 0);
  const strip = el("div.strip", { role: "img", "aria-label": `${label}: ${shown.map((p) => `${p.name} ${p.text}`).join(", ") || "nothing"}` });
  for (const part of shown) {
    const piece = el(`span.${part.kind}`, { title: `${part.name}: ${part.text}` });
    piece.style.width = `${(100 * part.value) / Math.max(all, 1)}%`;
    strip.append(piece);
  }
  const legend = el("ul.legend", { "aria-hidden": "true" }, ...shown.map((p) => el("li", {}, el(`span.swatch.${p.kind}`), `${p.name} `, el("b", {}, p.text))));
  return [strip, legend];
}

/** Put `children` in place of what `parent` has, unless that would change nothing. */
export function fill(parent, ...children) {
  const made = el("div", {}, ...children);
  if (made.innerHTML !== parent.innerHTML) parent.replaceChildren(...made.childNodes);
}

/** Pairs of a `dl`. */
export const pairs = (entries) => entries.filter(Boolean).map(([name, value, title]) => el("div", { title: title ?? null }, el("dt", {}, name), el("dd", {}, value)));
