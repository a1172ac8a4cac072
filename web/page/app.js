/** The page: the chat, the message box, and the parts wired together. */
import { conversation } from "./chat.js";
import { by, h, keep, recall } from "./dom.js";
import { api, engineLife } from "./engine.js";
import { DEMO, dropped, modelDialog, modelName } from "./model.js";
import { cachePanel } from "./panel.js";
import { settings, settingsDialog } from "./settings.js";
import { sentence } from "./words.js";

/** @typedef {import("./chat.js").Entry} Entry */

const message = by("message"), send = by("send"), notice = by("notice");
/** To the message box; on a touch screen, where the keyboard would come up and hide the answer, to the conversation. */
const focus = () => (matchMedia("(hover: hover)").matches ? message : by("log")).focus({ preventScroll: true });
/** To screen readers. @param {string} text */
const announce = (text) => { by("announce").textContent = text; };

/** What the demo model does well, and what to ask next. @type {Record<string, string[]>} */
const DEMO_CAN = {
  "Tell me a story about a fox named Leo and a lantern.": ["Who has the lantern?", "Where is Leo?"],
  "What is 17 + 25?": ["What is 81 - 36?"],
  "Anna took the key. Anna went to the garden. Where is the key?": ["Then Anna gave the key to Ben. Who has the key?"],
  "What can you do?": [],
};

/** @type {Entry[]} */
let entries = stored();
/** The message that the box's text will replace. @type {Entry | null} */
let editing = null;
/** What the box held before. */
let draft = "";
/** Ends the answer under way. @type {(() => void) | null} */
let stop = null;

const view = conversation({ edit, retry });
const life = engineLife({
  announce, focus,
  choose: () => models.open(),
  changed(engine) {
    panel.device(engine?.info ?? null);
    suggest();
    if (engine?.info.chat === false) say("This model has no chat template: it continues your text instead of answering.");
  },
});
const panel = cachePanel({ engine: () => life.engine, leave: focus, announce });
const models = modelDialog({ api, current: () => ({ model: life.model, info: life.engine?.info ?? null }), load: (model) => life.start(model) });
const openSettings = settingsDialog((on) => life.engine?.setPrefixCache(on).then(panel.refresh, () => {}));

/** The chat of the last visit. */
function stored() {
  const kept = recall("chat", /** @type {any} */ ([]));
  /** @type {Entry[]} */
  const valid = Array.isArray(kept) ? kept.filter((e) => (e?.role === "user" || e?.role === "assistant") && typeof e.content === "string") : [];
  for (const { meta } of valid) {
    const numbers = [meta?.usage?.promptTokens, meta?.usage?.reused, meta?.usage?.computed, meta?.usage?.completionTokens];
    if (numbers.some((n) => typeof n !== "number")) delete meta?.usage;
  }
  if (valid.at(-1)?.role === "user") valid.push({ role: "assistant", content: "", meta: { note: "The page was closed before this was answered." } });
  return valid;
}

/** All but the answer under way. */
const remember = () => keep("chat", stop ? entries.slice(0, -1) : entries);

/** What the model is told: all but the answer to come; turns without an answer are left out. */
function told() {
  const system = settings.system.trim(), past = entries.slice(0, -1);
  const kept = past.filter((e, i) => e.content !== "" && (e.role === "assistant" || i + 1 === past.length || past[i + 1].content !== ""));
  return [...(system ? [{ role: "system", content: system }] : []), ...kept.map(({ role, content }) => ({ role, content }))];
}

/** @param {string} text */
function submit(text) {
  if (stop || !text.trim()) return;
  if (editing) entries.length = entries.indexOf(editing);
  editing = null;
  say(null);
  panel.uncover();
  entries.push({ role: "user", content: text.trim() });
  view.show(entries);
  answer(false);
}

/** @param {boolean} again whether the same text was answered before */
async function answer(again) {
  /** @type {import("./chat.js").Meta} */
  const meta = {};
  /** @type {Entry} */
  const entry = { role: "assistant", content: "", meta };
  /** @type {Promise<null>} */
  const stopped = new Promise((ok) => setStop(() => ok(null)));
  entries.push(entry);
  remember();
  view.show(entries);
  suggest();
  view.change(entry, life.engine ? "…" : "Waiting for the model…");
  if (!life.engine) announce("Waiting for the model.");
  let poll = 0;
  /** @type {import("./js/selkie.js").Engine | null} */
  let engine = null;
  try {
    engine = await Promise.race([life.settled(), stopped]);
    if (engine) {
      view.change(entry, "…");
      const sampling = { ...settings.sampling };
      if (again && sampling.temperature === undefined && sampling.seed === undefined && engine.info.defaults?.temperature === 0) {
        sampling.temperature = 0.7;
        sampling.topP ??= 0.95;
        meta.note = "Another try, at temperature 0.7: at 0, the model's own, it would be the same.";
      }
      const messages = told();
      // A change of the setting is refused while an answer runs, and a load that had begun did not know it.
      await engine.setPrefixCache(settings.prefixCache).catch(() => {});
      const generation = engine.generate({ ...(engine.info.chat ? { messages } : { prompt: messages.map((m) => m.content).join("\n") }), ...sampling });
      setStop(() => generation.cancel());
      poll = setInterval(panel.refresh, 400);
      for await (const update of generation) {
        if (update.type === "text") {
          entry.content += update.text;
          view.change(entry);
        } else {
          const { text, usage, finish, ttftMs, tokensPerSecond } = update;
          entry.content = text;
          Object.assign(meta, { usage, finish, ttftMs, tokensPerSecond });
        }
      }
    } else meta.finish = "cancelled";
  } catch (error) {
    const why = sentence(error);
    if (why.code === "cancelled") meta.finish = "cancelled";
    // What befell the model is told above the message box.
    else if (!engine) meta.note = "No model was there to answer this.";
    else if (why.code === "device_lost") meta.note = "The model stopped here.";
    else meta.error = why;
  }
  clearInterval(poll);
  setStop(null);
  suggest();
  view.change(entry, "");
  view.flush();
  // A new chat may have begun in the meantime.
  if (!entries.includes(entry)) return;
  remember();
  panel.turns(entries);
  panel.refresh();
  announce(meta.error?.text ?? `${meta.finish === "cancelled" ? "Stopped. " : ""}${entry.content}`);
}

function retry() {
  if (stop || entries.at(-1)?.role !== "assistant") return;
  const again = entries.pop()?.content !== "";
  focus();
  answer(again);
}

/** @param {Entry} entry */
function edit(entry) {
  if (stop) return;
  if (!editing) draft = message.value;
  editing = entry;
  fill(entry.content);
  message.focus();
  say("What you send replaces this message and all that follows.", "Cancel", () => { editing = null; fill(draft); });
}

function newChat() {
  stop?.();
  editing = null;
  const before = entries;
  show([]);
  focus();
  if (before.length) say("New chat.", "Undo", () => { if (!stop) show([...before, ...entries]); });
}

/** @param {Entry[]} chat */
function show(chat) {
  entries = chat;
  view.show([]);
  view.show(entries);
  suggest();
  panel.turns(entries);
  remember();
}

/** A line above the message box. @param {string | null} text @param {string} [label] of a button @param {() => void} [act] */
function say(text, label, act) {
  notice.hidden = text === null;
  notice.replaceChildren(text ?? "", label ? h("button", { type: "button", className: "quiet", onclick: () => { say(null); act?.(); focus(); } }, label) : "");
  if (text) announce(text);
}

/** The send button stops while an answer is under way. @param {(() => void) | null} how */
function setStop(how) {
  stop = how;
  const label = how ? "Stop" : "Send";
  document.documentElement.dataset.answer = how ? "running" : "none";
  if (send.title === label) return;
  send.title = label;
  send.setAttribute("aria-label", label);
  send.querySelector("use").setAttribute("href", how ? "#i-stop" : "#i-send");
}

/** Something to begin with, and what may follow. */
function suggest() {
  const chip = (/** @type {string} */ text) => h("button", { type: "button", onclick: () => { editing = null; focus(); submit(text); } }, text);
  const demo = life.model === DEMO, begin = demo ? Object.keys(DEMO_CAN) : ["What can you do?", "Explain why the sky is blue.", "Write a short poem about the sea."];
  by("chips").replaceChildren(...begin.map(chip));
  const follow = demo && !stop && entries.length === 2 ? DEMO_CAN[entries[0].content] ?? [] : [];
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
  // While an input method composes, Enter belongs to it.
  if (event.isComposing || event.keyCode === 229) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    if (!stop) by("composer").requestSubmit();
  } else if (event.key === "Escape") stop?.();
});
by("composer").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  focus();
  if (stop) return stop();
  const text = message.value;
  if (!text.trim()) return;
  fill("");
  submit(text);
});

by("model-button").addEventListener("click", () => models.open());
by("open-settings").addEventListener("click", () => openSettings(life.engine?.info.defaults ?? {}));
by("new-chat").addEventListener("click", newChat);
by("theme").addEventListener("click", () => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
  root.dataset.theme = theme;
  // Back at what the system says: follow it again.
  keep("theme", theme === system ? null : theme);
  announce(`${theme} colours`);
});
// A press and a release beside a dialog close it.
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
  models.offer(dropped(event.dataTransfer));
});

// Without it the page works, and is only not kept for the next visit.
navigator.serviceWorker?.register("sw.js").catch(() => {});

view.show(entries);
panel.turns(entries);
focus();
// A model of the user's own is taken again only if it is kept here: opening the page contacts nobody.
const last = recall("model", /** @type {unknown} */ (null));
const kept = typeof last === "string" && (await api().then((a) => a.storage()).catch(() => null))?.models.some((m) => m.url === last && m.done);
life.start(typeof last === "string" && kept ? { source: { url: last }, name: modelName(last) } : DEMO);
