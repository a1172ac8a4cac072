/** The conversation on the page. Changes are drawn once per animation frame. */
import { copyButton } from "./code.js";
import { by, count, h, icon, plural, put } from "./dom.js";
import { draw, nothingDrawn, parts } from "./markdown.js";
import { speed } from "./panel.js";

/**
 * The engine's report about an answer, and additions by the page.
 * @typedef {object} Meta
 * @property {import("./js/selkie.js").Usage} [usage]
 * @property {"stop" | "length" | "cancelled"} [finish]
 * @property {number | null} [ttftMs]
 * @property {number | null} [tokensPerSecond]
 * @property {string} [note]
 * @property {{ code: string, text: string, advice: string }} [error]
 * @property {number} [left] entries of the chat that the prompt left out
 * @property {boolean} [dropped] whether the prompt of the answer before had more of them
 * @property {string} [running] the tab that is answering
 */
/**
 * `content` and `meta` are those of the version that is shown, `versions[at]`; with one version there is no list.
 * @typedef {{ role: "user" | "assistant", content: string, meta?: Meta, versions?: { content: string, meta: Meta }[], at?: number }} Entry
 */

/** Prompts shorter than this are never reused, so the page does not say it below each of them. */
const PAGE = 64;
/** How long a frame may draw; the next one draws the rest. */
const FRAME_MS = 8;
/** A message longer than this scrolls in a box of its own. */
const LONG = 2500;
/** Entries that are shown immediately; older ones follow frame by frame. */
const FIRST = 30;

/** @param {Meta} meta */
const facts = (meta) => [speed(meta), meta.usage?.reason && meta.usage.promptTokens > PAGE && `${count(meta.usage.reused)} of ${plural(meta.usage.promptTokens, "prompt token")} reused${meta.usage.converted ? ", converted" : ""}`].filter(Boolean).join(" · ");

/**
 * @param {object} on
 * @param {(entry: Entry) => void} on.edit
 * @param {() => void} on.retry
 * @param {(entry: Entry, at: number) => void} on.version shows another version of an answer
 */
export function conversation(on) {
  const log = by("log"), turns = by("turns"), toEnd = by("to-end");
  /** @type {Map<Entry, { node: HTMLElement, body: HTMLElement, foot: HTMLElement, drawn: import("./markdown.js").Drawn, status: string }>} */
  const views = new Map();
  /** @type {Set<Entry>} */
  const changed = new Set();
  let atEnd = true, frame = 0;

  const mark = () => {
    atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    toEnd.hidden = atEnd || views.size === 0;
  };
  const follow = () => {
    if (atEnd && views.size) log.scrollTo(0, log.scrollHeight);
    mark();
  };
  log.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(follow).observe(log);
  toEnd.addEventListener("click", () => {
    atEnd = true;
    log.scrollTo({ top: log.scrollHeight, behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  });

  /** Draws what changed, the newest first, as far as a frame has time. @param {Entry} [whole] is drawn to its end */
  function flush(whole) {
    cancelAnimationFrame(frame);
    frame = 0;
    const start = performance.now(), until = start + FRAME_MS;
    for (const entry of [...changed].reverse()) {
      if (entry !== whole && performance.now() > until) break;
      if (paint(entry, entry === whole ? Infinity : until)) changed.delete(entry);
    }
    while (older.length && performance.now() < until) place(/** @type {Entry} */ (older.pop()), true);
    follow();
    if (changed.size || older.length) frame = requestAnimationFrame(() => flush());
    performance.measure("draw", { start });
  }

  /** @param {Entry} entry @param {number} until @returns {boolean} whether all of it is drawn */
  function paint(entry, until) {
    const view = views.get(entry);
    if (!view) return true;
    if (entry.role === "user") {
      view.body.textContent = entry.content;
      return true;
    }
    const done = draw(view.body, entry.content, view.drawn, until);
    const meta = entry.meta ?? {}, busy = view.status !== "";
    view.node.classList.toggle("busy", busy);
    view.node.setAttribute("aria-busy", String(busy));
    const said = [
      busy && view.status !== "…" && view.status,
      meta.error && `${meta.error.text} ${meta.error.advice}`,
      meta.finish === "cancelled" && "Stopped.",
      leftOut(entry),
      meta.finish === "length" && `Cut off after ${plural(meta.usage?.completionTokens ?? 0, "token")}, the most that was allowed.`,
      meta.note,
    ].filter(Boolean).join(" ");
    if (busy) {
      view.foot.replaceChildren(said);
      return done;
    }
    put(view.foot,
      said && h("p", { className: meta.error ? "problem" : "said" }, said),
      h("div", { className: "tools" },
        versions(entry), h("button", { type: "button", className: "quiet retry", onclick: on.retry }, "Retry"),
        entry.content !== "" && copyButton(() => parts(entry.content).rest, "Copy the answer"),
        h("span", { className: "facts" }, facts(meta))));
    return done;
  }

  /** Shown once, at the first answer after older messages were left out. @param {Entry} entry */
  function leftOut({ meta }) {
    const { left, dropped, usage } = meta ?? {};
    if (!left || !dropped || !usage?.reason) return "";
    const reused = usage.reused ? `The first ${count(usage.reused)} of its ${plural(usage.promptTokens, "token")} were reused` : `None of its ${plural(usage.promptTokens, "token")} was reused`;
    return `Without the oldest ${plural(left, "message")} the prompt has changed. ${reused}; from the next turn on, reuse works as before.`;
  }

  /** @param {Entry} entry */
  function versions(entry) {
    const many = entry.versions?.length ?? 1, at = entry.at ?? 0;
    if (many < 2) return null;
    const go = (/** @type {number} */ to, /** @type {string} */ label, /** @type {string} */ sign) =>
      h("button", { type: "button", className: "quiet", "aria-label": label, disabled: to < 0 || to >= many, onclick: () => on.version(entry, to) }, sign);
    return h("span", { className: "versions", role: "group", "aria-label": "Versions of the answer" },
      go(at - 1, "Earlier version", "‹"), h("span", {}, `${at + 1}/${many}`), go(at + 1, "Later version", "›"));
  }

  /** @param {Entry} entry @param {boolean} [first] before all others */
  function place(entry, first = false) {
    const user = entry.role === "user", long = user && entry.content.length > LONG;
    const body = h("div", { className: long ? "body long" : "body", ...(user ? { dir: "auto" } : {}), ...(long ? { tabIndex: 0, role: "group", "aria-label": "Your message" } : {}) });
    const foot = h("div", { className: "foot" });
    if (user) foot.append(h("button", { type: "button", className: "quiet", title: "Edit", "aria-label": "Edit this message", onclick: () => on.edit(entry) }, icon("i-edit")));
    const node = h("li", { className: `turn ${entry.role}` }, h("span", { className: "sr" }, user ? "You:" : "Model:"), body, foot);
    views.set(entry, { node, body, foot, drawn: nothingDrawn(), status: statuses.get(entry) ?? "" });
    const before = first ? turns.firstElementChild : null;
    turns.insertBefore(node, before);
    if (entry === kept) turns.insertBefore(cut, node);
    changed.add(entry);
  }

  /** The line between the messages that the prompt leaves out and the rest. */
  const cut = h("li", { className: "cut" }, "The model no longer sees the messages above");
  /** The first message below it. @type {Entry | null} */
  let kept = null;
  /** Entries that are not shown yet, the newest last. @type {Entry[]} */
  let older = [];
  /** The status of unfinished answers, also of entries that are not shown yet. @type {WeakMap<Entry, string>} */
  const statuses = new WeakMap();

  return {
    flush,
    /** Redraws an entry in the next frame. @param {Entry} entry @param {string} [status] of an unfinished answer; "" when finished */
    change(entry, status) {
      if (status !== undefined) statuses.set(entry, status);
      const view = views.get(entry);
      if (!view) return;
      if (status !== undefined) view.status = status;
      changed.add(entry);
      frame ||= requestAnimationFrame(() => flush());
    },
    /** Shows exactly these entries. @param {Entry[]} entries @param {number} [left] how many of the oldest the prompt leaves out */
    show(entries, left = 0) {
      const wanted = new Set(entries);
      for (const [entry, view] of views) if (!wanted.has(entry)) { view.node.remove(); views.delete(entry); }
      const missing = entries.filter((entry) => !views.has(entry)), now = views.size ? missing : missing.slice(-FIRST);
      older = views.size ? older.filter((entry) => wanted.has(entry)) : missing.slice(0, -FIRST);
      kept = left ? entries[left] ?? null : null;
      cut.remove();
      if (kept && views.has(kept)) turns.insertBefore(cut, views.get(kept)?.node ?? null);
      const begun = new Set(older);
      for (const entry of now) if (!begun.has(entry)) {
        place(entry);
        if (entry.role === "user") atEnd = true;
      }
      by("welcome").hidden = entries.length > 0;
      frame ||= requestAnimationFrame(() => flush());
    },
  };
}
