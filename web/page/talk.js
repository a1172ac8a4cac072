/** The chat that is shown: asking, answering, versions of answers, saving, and the messages of the prompt. */
import { by, h, keep, plural, recall } from "./dom.js";
import { settings } from "./settings.js";
import { chats, newChat, newId } from "./store.js";
import { fileName, fromBundle, validEntries } from "./transfer.js";
import { sentence } from "./words.js";

/** @typedef {import("./chat.js").Entry} Entry */
/** @typedef {import("./chat.js").Meta} Meta */
/** @typedef {import("./store.js").Chat} Chat */

/** How often a partial answer is saved, and how long one in another tab may be silent before it counts as interrupted. */
const KEEP_MS = 1000, SILENCE_MS = 6000;
/** After dropping, the prompt fills this share of the context, so that not every turn has to drop again. */
const KEPT_SHARE = 0.5;
const CUT_SHORT = "The page was closed before the answer was finished.";
const UNANSWERED = "The page was closed before this was answered.";

/** This tab, also after a reload. */
const tab = (() => {
  try {
    return (sessionStorage["selkie.tab"] ??= newId());
  } catch {
    return newId();
  }
})();
/** The chat that this tab showed last, else any tab. @param {string} [id] */
function lastId(id) {
  try {
    if (id) sessionStorage["selkie.chat"] = id;
    if (id) keep("last-chat", id);
    return sessionStorage["selkie.chat"] ?? recall("last-chat", "");
  } catch {
    return recall("last-chat", "");
  }
}

/**
 * @param {object} page
 * @param {ReturnType<typeof import("./chat.js").conversation>} page.view
 * @param {any} page.life see engine.js
 * @param {ReturnType<typeof import("./panel.js").cachePanel>} page.panel
 * @param {(text: string | null, label?: string, act?: () => void) => void} page.say
 * @param {(text: string) => void} page.announce
 * @param {(stop: (() => void) | null) => void} page.running called with the function that stops an answer when it begins, with null when it ends
 * @param {() => void} page.shown another chat or other messages are shown
 */
export function talk({ view, life, panel, say, announce, running, shown }) {
  let chat = newChat();
  /** Stops the running answer. @type {(() => void) | null} */
  let stop = null;
  /** Entries that this engine answered; the panel marks the others as older. @type {WeakSet<Entry>} */
  const fresh = new WeakSet();
  /** Chats that were deleted here: the end of an answer does not save them again. @type {Set<string>} */
  const gone = new Set();
  /** Where the converted values come from that chats continue from, by id: an engine has them until it is closed. @type {WeakMap<object, Map<string, string>>} */
  const origins = new WeakMap();
  const origin = (/** @type {object} */ engine) => origins.get(engine)?.get(chat.id) ?? "";
  const system = () => chat.system ?? settings.system.trim();
  const setStop = (/** @type {(() => void) | null} */ how) => running((stop = how));

  async function save() {
    if (!chat.entries.length) return;
    const mine = chat;
    mine.updated = Date.now();
    if (!mine.named) mine.title = title(mine.entries);
    mine.model = { name: life.model.name, ...("url" in life.model.source && { url: life.model.source.url }) };
    const own = await chats.save(mine).catch(() => false);
    if (mine === chat) lastId(chat.id);
    if (own && mine === chat) say("Another tab continued this chat. The one here is now a separate chat.");
    if (mine === chat) shown();
  }

  /** @param {Chat} next */
  function show(next) {
    if (stop && next.id !== chat.id) stop();
    chat = next;
    if (chat.entries.length) lastId(chat.id);
    view.show([]);
    redraw();
  }

  function redraw() {
    view.show(chat.entries, chat.left ?? 0);
    panel.turns(chat.entries, fresh);
    gauge();
    shown();
  }

  /** Opens a kept chat. @param {string} id @param {boolean} [quiet] says nothing about its model */
  async function open(id, quiet = false) {
    const kept = id ? await chats.get(id).catch(() => null) : null;
    if (!kept) return false;
    gone.delete(id);
    kept.entries = validEntries(kept.entries);
    const last = kept.entries.at(-1);
    if (last?.role === "user") kept.entries.push({ role: "assistant", content: "", meta: { note: UNANSWERED } });
    show(kept);
    if (last?.meta?.running) settle(kept, last);
    const name = kept.model?.name;
    if (!quiet && name && name !== life.model.name) say(`This chat was with ${name}; ${life.model.name} continues it.`);
    return true;
  }

  /** Completes an answer that was not finished when its chat was saved. @param {Chat} kept @param {Entry} entry */
  function settle(kept, entry) {
    const meta = /** @type {Meta} */ (entry.meta), end = () => {
      // The part that arrived after it was last saved.
      const part = recall(`part.${kept.id}`, /** @type {any} */ (null));
      if (part?.entry === kept.entries.length - 1 && typeof part.content === "string" && part.content.startsWith(entry.content)) entry.content = part.content;
      keep(`part.${kept.id}`, null);
      delete meta.running;
      Object.assign(meta, entry.content ? { finish: "cancelled", note: CUT_SHORT } : { note: UNANSWERED });
      view.change(entry, "");
      if (kept === chat) save();
    };
    if (meta.running === tab) return end();
    const { rev } = kept;
    view.change(entry, "Being answered in another tab…");
    setTimeout(() => { if (kept === chat && !stop && chat.rev === rev && meta.running) end(); }, SILENCE_MS);
  }

  /** @param {Entry[]} entries */
  const title = (entries) => {
    const text = (entries.find((e) => e.role === "user")?.content ?? "").replace(/\s+/g, " ").trim();
    return text.length > 60 ? `${text.slice(0, 58).replace(/\s\S*$/, "")}…` : text || "New chat";
  };

  /**
   * The messages of the prompt: all before the new answer, without unanswered turns and, if necessary, without the oldest ones.
   * `turns` has, for each message except the system prompt, its index in the chat's entries.
   * @param {number} [end] where the new answer is
   */
  function told(end = chat.entries.length - 1) {
    const first = system(), from = chat.left ?? 0, past = chat.entries.slice(from, end);
    const told = (/** @type {Entry} */ e, /** @type {number} */ i) => e.content !== "" && (e.role === "assistant" || i + 1 === past.length || past[i + 1].content !== "");
    const turns = past.flatMap((e, i) => (told(e, i) ? [from + i] : []));
    const messages = turns.map((i) => ({ role: chat.entries[i].role, content: chat.entries[i].content }));
    return { messages: [...(first ? [{ role: "system", content: first }] : []), ...messages], turns };
  }

  /**
   * Leaves the oldest turns out of the prompt until about half of the context is free, before it is full. The engine does
   * the same with exact counts for `whenFull: "drop-oldest"`.
   * @returns {boolean} whether there was one to leave out
   */
  function dropOldest() {
    const { entries } = chat, size = (/** @type {number} */ from) => entries.slice(from, -1).reduce((sum, e) => sum + e.content.length, system().length);
    const used = entries.findLast((e) => e.meta?.usage?.reason)?.meta?.usage, before = chat.left ?? 0;
    // Tokens per character: as in the last prompt, else as in most text.
    const answered = entries.findLastIndex((e) => e.meta?.usage?.reason);
    const each = used ? used.promptTokens / Math.max(1, entries.slice(before, answered).reduce((sum, e) => sum + e.content.length, system().length)) : 0.3;
    const most = (life.engine?.info.contextTokens ?? 0) * KEPT_SHARE;
    // A turn begins with a message of the user. The last turn stays.
    const starts = entries.flatMap((e, i) => (e.role === "user" && i > before ? [i] : []));
    const left = starts.find((i) => size(i) * each <= most) ?? starts.at(-1);
    if (left === undefined) return false;
    chat.left = left;
    return true;
  }

  const tooLong = (/** @type {{ code: string, text: string } | undefined} */ why) => why?.code === "bad_request" && /\bcontext\b/i.test(why.text);

  /** Continues when the context is full. */
  function goOn() {
    if (stop) return;
    const last = chat.entries.at(-1), failed = tooLong(last?.meta?.error);
    // If the last answer failed, its entry is used again.
    if (!failed) chat.entries.push({ role: "assistant", content: "" });
    const dropped = failed ? chat.entries.findLastIndex((e) => e.role === "user") > (chat.left ?? 0) : dropOldest();
    if (!failed) chat.entries.pop();
    if (!dropped) return say("There is no older turn to leave out: the last message alone is too long. Edit it, or begin a new chat.");
    redraw();
    if (failed) retry("drop-oldest");
    else {
      save();
      say(`The model no longer sees the oldest ${plural(chat.left ?? 0, "message")}. They stay here to read.`);
    }
  }

  /** Shows how full the context is, once that matters. */
  function gauge() {
    const box = by("gauge"), total = life.engine?.info.contextTokens ?? 0, last = chat.entries.at(-1);
    const usage = chat.entries.findLast((e, i) => e.meta?.usage?.reason && i >= (chat.left ?? 0))?.meta;
    const dropped = (usage?.left ?? 0) !== (chat.left ?? 0);
    const used = dropped ? 0 : (usage?.usage?.promptTokens ?? 0) + (usage?.usage?.completionTokens ?? 0), full = tooLong(last?.meta?.error);
    box.hidden = !total || (!full && used < 0.6 * total);
    if (box.hidden) return;
    const k = (/** @type {number} */ n) => (n < 1000 ? String(n) : `${(n / 1000).toFixed(1)}k`);
    const text = full ? `The context of ${k(total)} tokens is full.` : `${k(used)} of ${k(total)} tokens of context used`;
    const meter = h("meter", { min: 0, max: total, value: full ? total : used, high: 0.85 * total, "aria-label": "Context used" });
    const act = (full || used >= 0.8 * total) && !stop;
    box.replaceChildren(meter, h("span", {}, text), act ? h("button", { type: "button", className: "quiet", onclick: goOn }, "Continue without the oldest turns") : "");
  }

  /** @param {string} text @param {Entry | null} [instead] the message that it replaces, with all that follows */
  function submit(text, instead = null) {
    if (stop || !text.trim()) return;
    const before = chat.entries.slice();
    if (instead && chat.entries.includes(instead)) chat.entries.length = chat.entries.indexOf(instead);
    if ((chat.left ?? 0) >= chat.entries.length) delete chat.left;
    say(null);
    if (instead && before.length - chat.entries.length > 2) {
      say("The messages after it were removed.", "Undo", () => { stop?.(); chat.entries = before; redraw(); save(); });
    }
    panel.uncover();
    chat.entries.push({ role: "user", content: text.trim() });
    chat.entries.push({ role: "assistant", content: "" });
    answer(false);
  }

  /** Answers the last message again. @param {"error" | "drop-oldest"} [whenFull] */
  function retry(whenFull) {
    const entry = chat.entries.at(-1);
    if (stop || entry?.role !== "assistant") return;
    const again = entry.content !== "";
    if (again) {
      entry.versions = [...keepVersion(entry), { content: "", meta: {} }];
      entry.at = entry.versions.length - 1;
    }
    entry.content = "";
    answer(again, whenFull);
  }

  /** The versions of an answer, the shown one as it is now. @param {Entry} entry */
  function keepVersion(entry) {
    const now = { content: entry.content, meta: entry.meta ?? {} };
    return entry.versions ? entry.versions.map((v, i) => (i === entry.at ? now : v)) : [now];
  }

  /** @param {Entry} entry @param {number} at */
  function version(entry, at) {
    if (stop || !entry.versions?.[at]) return;
    entry.versions = keepVersion(entry);
    Object.assign(entry, { at, ...entry.versions[at] });
    view.change(entry, "");
    panel.turns(chat.entries, fresh);
    save();
  }

  /**
   * Answers into the last entry.
   * @param {boolean} again whether the same text was answered before
   * @param {"error" | "drop-oldest"} [whenFull] instead of the setting
   */
  async function answer(again, whenFull = settings.whenFull) {
    const mine = chat, entry = /** @type {Entry} */ (mine.entries.at(-1)), left = mine.left;
    /** @type {Meta} */
    const meta = (entry.meta = { running: tab });
    /** @type {Promise<null>} */
    const stopped = new Promise((ok) => setStop(() => ok(null)));
    save();
    redraw();
    view.change(entry, life.engine ? "…" : "Waiting for the model…");
    if (!life.engine) announce("Waiting for the model.");
    const polls = [setInterval(panel.refresh, 400), setInterval(() => { if (mine === chat) save(); }, KEEP_MS)];
    let started = false;
    try {
      const engine = await Promise.race([life.settled(), stopped]);
      started = engine !== null;
      if (!engine) meta.finish = "cancelled";
      else await generate(engine, entry, meta, again, whenFull);
    } catch (error) {
      const why = sentence(error);
      if (why.code === "cancelled") meta.finish = "cancelled";
      // A line above the message box explains the failure of the model.
      else if (!started) meta.note = "No model was loaded to answer this.";
      else if (why.code === "device_lost") meta.note = "The model stopped here.";
      else meta.error = why;
    }
    polls.forEach(clearInterval);
    delete meta.running;
    setStop(null);
    view.change(entry, "");
    view.flush(entry);
    if (mine !== chat) {
      // Another chat is shown now.
      mine.updated = Date.now();
      if (!gone.has(mine.id)) chats.save(mine).catch(() => {});
      return;
    }
    if (!mine.entries.includes(entry)) return;
    if (mine.left !== left) redraw();
    fresh.add(entry);
    save();
    panel.turns(chat.entries, fresh);
    panel.refresh();
    gauge();
    announce(meta.error?.text ?? `${meta.finish === "cancelled" ? "Stopped. " : ""}${entry.content}`);
  }

  /**
   * @param {import("./js/selkie.js").Engine} engine
   * @param {Entry} entry
   * @param {Meta} meta
   * @param {boolean} again
   * @param {"error" | "drop-oldest"} whenFull
   */
  async function generate(engine, entry, meta, again, whenFull) {
    view.change(entry, "…");
    const sampling = { ...settings.sampling };
    if (again && sampling.temperature === undefined && sampling.seed === undefined && engine.info.defaults?.temperature === 0) {
      sampling.temperature = 0.7;
      sampling.topP ??= 0.95;
      meta.note = "Another try, at temperature 0.7: at 0, the model's own, it would be the same.";
    }
    const mine = chat, from = chat.left ?? 0, { messages, turns } = told();
    const before = chat.entries.slice(0, -1).findLast((e) => e.meta?.usage?.reason)?.meta?.left ?? 0;
    const leave = (/** @type {number} */ left) => {
      if (!left) return;
      mine.left = meta.left = left;
      meta.dropped = left !== before;
    };
    leave(from);
    // The engine refuses a change of the setting while an answer runs, and a load may have begun before the change.
    await engine.setPrefixCache(settings.prefixCache).catch(() => {});
    const prompt = engine.info.chat ? { messages, whenFull } : { prompt: messages.map((m) => m.content).join("\n") };
    const generation = engine.generate({ ...prompt, ...sampling, origin: origin(engine) });
    setStop(() => generation.cancel());
    for await (const update of generation) {
      if (update.type === "text") {
        entry.content += update.text;
        view.change(entry);
      } else {
        const { text, usage, finish, ttftMs, tokensPerSecond, leftOutMessages } = update;
        entry.content = text;
        // These messages stay left out, so that the next turn continues from this one.
        if (leftOutMessages) leave(turns[leftOutMessages] ?? from);
        Object.assign(meta, { usage, finish, ttftMs, tokensPerSecond });
      }
    }
  }

  /** Another tab changed a chat. @param {string} id */
  async function elsewhere(id) {
    if (id === chat.id && !stop && chat.rev > 0 && ((await chats.get(id))?.rev ?? 0) > chat.rev) await open(id, true);
    shown();
  }
  chats.changed(elsewhere);
  addEventListener("pagehide", () => {
    const entry = chat.entries.at(-1);
    if (stop && entry?.meta?.running) keep(`part.${chat.id}`, { entry: chat.entries.length - 1, content: entry.content });
  });

  return {
    get chat() { return chat; },
    get busy() { return stop !== null; },
    fresh, submit, retry, version, show, open, gauge,
    stop: () => stop?.(),

    /** The chat with the engine's states, as a file: null if there is none. @returns {Promise<[string, Blob, string] | null>} */
    async bundle() {
      if (stop) throw new Error("The states can be exported when the answer is complete.");
      const { title, entries } = chat, { messages } = told(entries.length);
      if (!entries.length) return null;
      const engine = await life.settled();
      if (!engine.info.chat) throw new Error("This model has no chat template, so there is no conversation to go on with.");
      const { blob } = await engine.saveState({ messages, origin: origin(engine) });
      return [fileName(title, "bundle"), blob, blob.type];
    },

    /** Gives the states of a bundle to the engine and makes its conversation a chat, which is not saved yet. @param {File} file */
    async take(file) {
      const engine = await life.settled();
      if (!engine.loadState) throw new Error("A model that runs in this page can go on with a bundle: choose one, then import it.");
      const state = await engine.loadState(file), one = fromBundle(state.messages, file.name);
      one.title = title(one.entries);
      if (!origins.has(engine)) origins.set(engine, new Map());
      if (state.converted) origins.get(engine)?.set(one.id, state.origin);
      panel.refresh();
      return { one, state };
    },

    /** A chat is about to be deleted. @param {string} id */
    removing(id) {
      gone.add(id);
      if (id === chat.id) show(newChat());
    },

    /** The chat of the last visit, also from a version of the page that kept only one. */
    async start() {
      const old = recall("chat", /** @type {any} */ (null));
      if (Array.isArray(old) && old.length) {
        const one = newChat();
        Object.assign(one, { entries: validEntries(old), title: title(validEntries(old)) });
        if (one.entries.length) await chats.save(one).then(() => lastId(one.id));
        keep("chat", null);
      }
      if (chat.entries.length || (await open(lastId(), true))) return;
      redraw();
    },
  };
}
