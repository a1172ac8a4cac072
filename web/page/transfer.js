/** Chats as files: Markdown for people, JSON with everything, bundles with the engine's states. All can be imported. */
import { newChat } from "./store.js";

/** @typedef {import("./store.js").Chat} Chat */
/** @typedef {import("./chat.js").Entry} Entry */

const FORMAT = "selkie-chats";
/** A line that begins a message in Markdown; one in a message gets a backslash before it. */
const MARK = /^<!-- selkie: (user|assistant) -->$/;
const QUOTED = /^\\+(?=<!-- selkie: (user|assistant) -->$)/;

/** @param {Chat} chat */
export function toMarkdown({ title, entries }) {
  const safe = (/** @type {string} */ text) => text.split("\n").map((line) => (MARK.test(line.replace(QUOTED, "")) ? `\\${line}` : line)).join("\n");
  const turns = entries.filter((e) => e.content !== "").map(({ role, content }) => `<!-- selkie: ${role} -->\n### ${role === "user" ? "You" : "Model"}\n\n${safe(content)}\n`);
  return [`# ${title}\n`, ...turns].join("\n");
}

/** @param {string} text @returns {Chat} */
function fromMarkdown(text) {
  const chat = newChat(), lines = text.split(/\r?\n/);
  chat.title = /^# (.+)/.exec(lines[0])?.[1] ?? "Imported chat";
  chat.named = true;
  /** @type {{ role: "user" | "assistant", lines: string[] }[]} */
  const found = [];
  for (const line of lines) {
    const role = MARK.exec(line)?.[1];
    if (role) found.push({ role: role === "user" ? "user" : "assistant", lines: [] });
    else found.at(-1)?.lines.push(QUOTED.test(line) ? line.slice(1) : line);
  }
  chat.entries = found.map(({ role, lines }) => ({ role, content: lines.join("\n").replace(/^### (You|Model)\n/, "").trim() }));
  return chat;
}

/** @param {Chat[]} chats */
export const toJson = (chats) => `${JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1)}\n`;

/**
 * The usable messages of a file, or of an older version of the page.
 * @param {unknown} kept @returns {Entry[]}
 */
export function validEntries(kept) {
  const message = (/** @type {any} */ e) => (e?.role === "user" || e?.role === "assistant") && typeof e.content === "string";
  return (Array.isArray(kept) ? kept : []).filter(message).map(({ role, content, meta, versions, at }) => {
    /** @type {Entry} */
    const entry = { role, content };
    if (meta && typeof meta === "object") entry.meta = validMeta(meta);
    const whole = Array.isArray(versions) && versions.length > 1 && versions.every((v) => typeof v?.content === "string") && at >= 0 && at < versions.length;
    if (whole) Object.assign(entry, { at, versions: versions.map((v) => ({ content: v.content, meta: validMeta(v.meta ?? {}) })) });
    return entry;
  });
}

/** @param {any} meta @returns {import("./chat.js").Meta} */
function validMeta(meta) {
  const { usage, finish, ttftMs, tokensPerSecond, note, error, left, dropped, running } = meta;
  const numbers = usage && ["promptTokens", "reused", "computed", "completionTokens", "matched"].every((name) => typeof usage[name] === "number");
  const number = (/** @type {unknown} */ n) => (typeof n === "number" ? n : undefined);
  const text = (/** @type {unknown} */ t) => (typeof t === "string" ? t : undefined);
  return {
    ...(numbers && { usage }), ttftMs: number(ttftMs), tokensPerSecond: number(tokensPerSecond), note: text(note), left: number(left), dropped: dropped === true, running: text(running),
    ...(["stop", "length", "cancelled"].includes(finish) && { finish }),
    ...(typeof error?.text === "string" && { error: { code: String(error.code), text: error.text, advice: String(error.advice ?? "") } }),
  };
}

/**
 * The chats of a file, as new ones: they replace none.
 * @param {string} text @returns {Chat[]}
 */
export function fromFile(text) {
  if (!/^\s*[{[]/.test(text)) {
    const chat = fromMarkdown(text);
    if (!chat.entries.length) throw new Error("There is no chat in this file. Choose a Markdown or JSON file that Export wrote.");
    return [chat];
  }
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error instanceof Error ? error.message : error}`);
  }
  const list = read?.format === FORMAT && Array.isArray(read.chats) ? read.chats : null;
  if (!list) throw new Error(`The file has no "format": "${FORMAT}" with a list of "chats".`);
  return list.map((/** @type {any} */ one) => {
    const chat = newChat(), time = (/** @type {unknown} */ t) => (typeof t === "number" && t > 0 && t < 1e14 ? t : Date.now());
    Object.assign(chat, { entries: validEntries(one?.entries), created: time(one?.created), updated: time(one?.updated), named: one?.named === true });
    if (typeof one?.title === "string") chat.title = one.title.slice(0, 200);
    if (Number.isInteger(one?.left) && one.left >= 0 && one.left < chat.entries.length) chat.left = one.left;
    if (typeof one?.system === "string") chat.system = one.system;
    if (typeof one?.model?.name === "string") chat.model = { name: one.model.name, ...(typeof one.model.url === "string" && { url: one.model.url }) };
    return chat;
  }).filter((/** @type {Chat} */ chat) => chat.entries.length > 0);
}

/** Whether a file is a bundle, by its name. @param {File} file */
export const isBundle = ({ name }) => /\.bundle$/i.test(name);

/**
 * The chat of a bundle's messages. Its system prompt is a part of the state, so the chat keeps it.
 * @param {import("./js/selkie.js").LoadedState["messages"]} messages @param {string} file @returns {Chat}
 */
export function fromBundle(messages, file) {
  if (!messages?.length) throw new Error(`${file} holds no conversation, only the state of a text.`);
  const chat = newChat(), first = messages[0].role === "system" ? 1 : 0;
  chat.system = first ? messages[0].content : "";
  chat.entries = messages.slice(first).map(({ role, content, tool_calls: calls, reasoning_content: thought }) => {
    if ((role !== "user" && role !== "assistant") || typeof content !== "string" || calls || thought) throw new Error(`${file} holds turns of tools or reasoning, which this page cannot continue.`);
    return { role, content };
  });
  return chat;
}

/** Hands a file to the user. @param {string} name @param {string | Blob} content @param {string} type */
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A file's name from a title. @param {string} title @param {string} ending */
export const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N} _-]+/gu, "").replace(/\s+/g, " ").trim().slice(0, 60) || "chat"}.${ending}`;
