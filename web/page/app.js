/** The page: the message box, and the connections between the parts. */
import { conversation } from "./chat.js";
import { by, bytes, h, keep } from "./dom.js";
import { api, engineLife } from "./engine.js";
import { chatList } from "./list.js";
import { DEMO, FIRST, askAgain, dropped, kept, modelDialog, modelName } from "./model.js";
import { cachePanel } from "./panel.js";
import { settings, settingsDialog } from "./settings.js";
import { chats, newChat } from "./store.js";
import { talk } from "./talk.js";
import { isBundle } from "./transfer.js";
import { sentence } from "./words.js";

/** @typedef {import("./chat.js").Entry} Entry */

const message = by("message"), send = by("send"), notice = by("notice"), touch = !matchMedia("(hover: hover)").matches;
/** Focuses the message box; on a touch screen the conversation, because the keyboard would hide the answer. */
const focus = () => (touch ? by("log") : message).focus({ preventScroll: true });
/** Announces a text to screen readers. @param {string} text */
const announce = (text) => { by("announce").textContent = text; };

/** Questions that the demo model answers well, and follow-up questions. @type {Record<string, string[]>} */
const DEMO_CAN = {
  "Tell me a story about a fox named Leo and a lantern.": ["Who has the lantern?", "Where is Leo?"],
  "What is 17 + 25?": ["What is 81 - 36?"],
  "Anna took the key. Anna went to the garden. Where is the key?": ["Then Anna gave the key to Ben. Who has the key?"],
  "What can you do?": [],
};

/** The message that the text of the box will replace. @type {Entry | null} */
let editing = null;
/** The previous text of the box. */
let draft = "";
/** The message to send when the running answer is finished. */
let queued = "";

const view = conversation({ edit, retry: () => { focus(); current.retry(); }, version: (entry, at) => current.version(entry, at) });
const life = engineLife({
  announce, focus,
  choose: () => models.open(),
  changed(engine) {
    panel.device(engine?.info ?? null);
    suggest();
    current?.gauge();
    if (engine?.info.chat === false) say("This model has no chat template: it continues your text instead of answering.");
  },
});
const panel = cachePanel({ engine: () => life.engine, leave: focus, announce });
const models = modelDialog({ api, current: () => ({ model: life.model, info: life.engine?.info ?? null }), load: (model) => life.start(model) });
const openSettings = settingsDialog((on) => life.engine?.setPrefixCache(on).then(panel.refresh, () => {}), forgetStates);
/** Deletes the kept states, and keeps no more unless `on`. @param {boolean} on */
async function forgetStates(on) {
  if (life.engine?.info.from === "server") return "The server's model keeps nothing in this browser.";
  try {
    await (await life.settled()).forgetStates({ stop: !on });
  } catch (error) {
    return sentence(error).text;
  }
  panel.refresh();
  return "Nothing is kept now.";
}
const current = talk({ view, life, panel, say, announce, running, shown });
const list = chatList({
  current: () => current.chat, say, leave: focus,
  open: (chat) => {
    endEditing();
    say(null);
    if (chat.id !== current.chat.id || current.chat.rev === 0) current.open(chat.id);
  },
  removing: (id) => current.removing(id),
  bundle: () => current.bundle(),
  takeBundle: (file) => current.take(file),
  renamed(chat) { if (chat.id === current.chat.id) shown(); },
});

/** Another chat, title or message is shown. */
function shown() {
  suggest();
  list?.refresh();
  const { title, entries } = current.chat;
  document.title = entries.length ? `${title} · selkie` : "selkie";
}

/** An answer begins or ends; while it runs, the send button stops it. @param {(() => void) | null} how */
function running(how) {
  const label = how ? "Stop" : "Send";
  document.documentElement.dataset.answer = how ? "running" : "none";
  if (send.title !== label) {
    send.title = label;
    send.setAttribute("aria-label", label);
    send.querySelector("use").setAttribute("href", how ? "#i-stop" : "#i-send");
  }
  if (!how && queued) setTimeout(sendQueued);
}

function sendQueued() {
  if (!queued || current.busy) return;
  const text = queued;
  queued = "";
  submit(text);
}

/** @param {string} text */
function submit(text) {
  const instead = editing;
  editing = null;
  say(null);
  current.submit(text, instead);
}

/** @param {Entry} entry */
function edit(entry) {
  if (current.busy) return;
  if (!editing) draft = message.value;
  editing = entry;
  fill(entry.content);
  message.focus();
  say("Your message will replace this one and all that follow.", "Cancel", endEditing);
}

function endEditing() {
  if (!editing) return;
  editing = null;
  say(null);
  fill(draft);
}

function beginNew() {
  const before = current.chat;
  endEditing();
  queued = "";
  current.stop();
  current.show(newChat());
  focus();
  if (before.entries.length) say("New chat.", "Undo", () => current.open(before.id));
}

/** Shows a line above the message box. @param {string | null} text @param {string} [label] of a button @param {() => void} [act] */
function say(text, label, act) {
  notice.hidden = text === null;
  notice.replaceChildren(text ?? "", label ? h("button", { type: "button", className: "quiet", onclick: () => { say(null); act?.(); focus(); } }, label) : "");
  if (text) announce(text);
}

/** Suggested questions, first and follow-up ones. */
function suggest() {
  const chip = (/** @type {string} */ text) => h("button", { type: "button", onclick: () => { editing = null; focus(); submit(text); } }, text), { entries } = current?.chat ?? newChat();
  const demo = life.model === DEMO, begin = demo ? Object.keys(DEMO_CAN) : ["What can you do?", "Explain why the sky is blue.", "Write a short poem about the sea."];
  by("chips").replaceChildren(...begin.map(chip));
  const follow = demo && !current?.busy && entries.length === 2 && entries[1].meta?.finish === "stop" ? DEMO_CAN[entries[0].content] ?? [] : [];
  by("follow").replaceChildren(...follow.map(chip));
}

/** @param {string} text */
function fill(text) {
  message.value = text;
  grow();
}

function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

message.addEventListener("input", grow);
message.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
  // While an input method composes, Enter confirms its text.
  if (event.isComposing || event.keyCode === 229) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    if (current.busy) queue();
    else by("composer").requestSubmit();
  } else if (event.key === "Escape") {
    if (editing) endEditing();
    else current.stop();
  } else if (event.key === "ArrowUp" && message.value === "" && !current.busy) {
    const last = current.chat.entries.findLast((e) => e.role === "user");
    if (!last) return;
    event.preventDefault();
    edit(last);
  }
});
by("composer").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  focus();
  if (current.busy) return current.stop();
  const text = message.value;
  if (!text.trim()) return;
  fill("");
  submit(text);
});

/** Enter while an answer runs: the text is sent after it. */
function queue() {
  const text = message.value.trim();
  if (!text) return;
  queued = queued ? `${queued}\n${text}` : text;
  fill("");
  const short = queued.length > 60 ? `${queued.slice(0, 58)}…` : queued;
  say(`Sent after this answer: “${short}”`, "Take back", () => { fill(queued); queued = ""; });
}

by("model-button").addEventListener("click", () => models.open());
by("open-settings").addEventListener("click", () => openSettings(life.engine?.info.defaults ?? {}));
by("new-chat").addEventListener("click", beginNew);
by("theme").addEventListener("click", () => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  root.dataset.theme = theme;
  // The choice equals the system's theme again: follow the system.
  keep("theme", theme === system ? null : theme);
  announce(`${theme} colours`);
});
// A click outside a dialog closes it: press and release must both be outside.
for (const dialog of document.querySelectorAll("dialog")) {
  let pressed = false;
  const beside = (/** @type {MouseEvent} */ { target, clientX: x, clientY: y }) => {
    const { left, right, top, bottom } = dialog.getBoundingClientRect();
    return target === dialog && (x < left || x > right || y < top || y > bottom);
  };
  dialog.addEventListener("pointerdown", (event) => { pressed = beside(event); });
  dialog.addEventListener("click", (event) => { if (pressed && beside(event)) dialog.close(); });
}

const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  by("drop").hidden = false;
});
addEventListener("dragleave", (event) => { if (!event.relatedTarget) by("drop").hidden = true; });
addEventListener("drop", (event) => {
  by("drop").hidden = true;
  if (!event.dataTransfer || !hasFiles(event)) return;
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  if (files.length && files.every(isBundle)) list.take(files);
  else models.offer(dropped(event.dataTransfer));
});

// Without a service worker the page works, but it does not open offline.
navigator.serviceWorker?.register("sw.js").catch(() => {});

chats.changed(() => list.refresh());
if (!touch) focus();
await current.start();
// The last model is used again only if it is in storage: opening the page must contact no other host.
const last = await kept(api);
// The first model runs until the user allows the folder; the folder is still the last model.
life.start(last.model ?? FIRST, undefined, !last.folder);
if (last.folder) askAgain(last.folder, { say, use: (model) => life.start(model), choose: () => models.open() });
else if (last.broken) {
  const { url, bytes: loaded } = last.broken, name = modelName(url);
  say(`The download of ${name} stopped at ${bytes(loaded)}.`, "Resume", () => life.start({ source: { url }, name }));
}
