// The page: which model, which panes, and who asks the server when.

import { json, onKeyWanted } from "./api.js";
import { Chat } from "./chat.js";
import { modelOf, showStatus, status } from "./live.js";
import { explain, showTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const LIVE = "mlxkv.live";
const THEME = "mlxkv.theme";

// the key

onKeyWanted(
  (reason) =>
    new Promise((resolve) => {
      const dialog = $("key-dialog");
      if (reason) $("key-why").textContent = reason;
      $("key").value = "";
      const done = () => {
        const key = $("key").value.trim();
        if (!key) return dialog.showModal(); // closed by Esc: nothing works without one
        dialog.removeEventListener("close", done);
        resolve(key);
      };
      dialog.addEventListener("close", done);
      dialog.showModal();
    }),
);

// light and dark

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  root.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  document.querySelector("meta[name=color-scheme]").content = theme === "auto" ? "light dark" : theme;
}

setTheme(THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, next);
  setTheme(next);
});

// the models

const model = () => $("model").value;
const MODEL = "mlxkv.model";

async function listModels() {
  const { data } = await json("v1/models");
  const wanted = localStorage.getItem(MODEL);
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === wanted)));
}

$("model").addEventListener("change", () => {
  localStorage.setItem(MODEL, model());
  look(true);
});

// the live view

let live = false;
let timer = null;
let treeAt = 0;
let failed = 0;

function setLive(on) {
  live = on;
  root.dataset.live = on ? "on" : "off";
  $("live").hidden = !on;
  $("live-toggle").setAttribute("aria-expanded", String(on));
  localStorage.setItem(LIVE, on ? "on" : "off");
  if (on) look(true);
}

$("live-toggle").addEventListener("click", () => setLive(!live));

function setHealth(state, text) {
  $("health").dataset.state = state;
  if ($("health-text").textContent !== text) $("health-text").textContent = text;
}

/** Look at the server, and again after a while: soon while something is seen to change, rarely when nobody looks. */
async function look(tree = false) {
  clearTimeout(timer);
  timer = null;
  if (tree) treeAt = 0;
  try {
    const now = await status();
    failed = 0;
    const loaded = modelOf(now, model());
    const busy = now.active + now.queued;
    if (now.status !== "ok") setHealth("bad", now.reason ?? now.status);
    else setHealth("ok", busy ? `${busy} ${busy === 1 ? "request" : "requests"}` : "ready");
    chat.progress(loaded?.engine?.rows ?? []);
    if (live) {
      showStatus(now, model());
      if (loaded && Date.now() > treeAt) {
        treeAt = Date.now() + 5000;
        await showTree(loaded.name);
      }
    }
  } catch (error) {
    failed += 1;
    setHealth("bad", error.message.replace(/\.$/, ""));
  }
  clearTimeout(timer);
  const soon = live || chat.running ? 1000 : 5000;
  timer = setTimeout(look, document.hidden ? 30000 : Math.min(30000, soon * 2 ** Math.min(failed, 5)));
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});

// the beginning

const chat = new Chat(model, () => look(true));
$("new-chat").addEventListener("click", () => chat.clear());
$("explain").addEventListener("click", () => explain(model(), chat.messages(true)));
listModels()
  .catch((error) => setHealth("bad", error.message))
  .finally(() => setLive(localStorage.getItem(LIVE) === "on"))
  .then(() => look());
