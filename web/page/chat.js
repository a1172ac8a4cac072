/** The conversation on the page. Changes are drawn once per animation frame. */
import { by, count, h, plural, put, svg } from "./dom.js";
import { draw } from "./markdown.js";
import { speed } from "./panel.js";

/**
 * What the engine reported about an answer, and what the page adds.
 * @typedef {object} Meta
 * @property {import("./js/selkie.js").Usage} [usage]
 * @property {"stop" | "length" | "cancelled"} [finish]
 * @property {number | null} [ttftMs]
 * @property {number | null} [tokensPerSecond]
 * @property {string} [note]
 * @property {{ code: string, text: string, advice: string }} [error]
 */
/** @typedef {{ role: "user" | "assistant", content: string, meta?: Meta }} Entry */

/** @param {string} id */
const icon = (id) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#${id}` }));

/** @param {Meta} meta */
const facts = (meta) => [speed(meta), meta.usage?.reason && `${count(meta.usage.reused)} of ${plural(meta.usage.promptTokens, "prompt token")} reused`].filter(Boolean).join(" · ");

/**
 * @param {object} on
 * @param {(entry: Entry) => void} on.edit
 * @param {() => void} on.retry
 */
export function conversation(on) {
  const log = by("log"), turns = by("turns"), toEnd = by("to-end");
  /** @type {Map<Entry, { node: HTMLElement, body: HTMLElement, foot: HTMLElement, drawn: string[], status: string }>} */
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

  function flush() {
    cancelAnimationFrame(frame);
    frame = 0;
    const now = [...changed];
    changed.clear();
    now.forEach(paint);
    follow();
  }

  /** @param {Entry} entry */
  function paint(entry) {
    const view = views.get(entry);
    if (!view) return;
    if (entry.role === "user") {
      view.body.textContent = entry.content;
      return;
    }
    draw(view.body, entry.content, view.drawn);
    const meta = entry.meta ?? {}, busy = view.status !== "";
    view.node.classList.toggle("busy", busy);
    view.node.setAttribute("aria-busy", String(busy));
    const said = [
      busy && view.status !== "…" && view.status,
      meta.error && `${meta.error.text} ${meta.error.advice}`,
      meta.finish === "cancelled" && "Stopped.",
      meta.finish === "length" && `Cut off after ${plural(meta.usage?.completionTokens ?? 0, "token")}, the most that was allowed.`,
      meta.note,
    ].filter(Boolean).join(" ");
    if (busy) {
      view.foot.replaceChildren(said);
      return;
    }
    put(view.foot,
      said && h("p", { className: meta.error ? "problem" : "said" }, said),
      h("div", { className: "tools" },
        h("button", { type: "button", className: "quiet retry", onclick: on.retry }, "Retry"), copy(entry),
        h("span", { className: "facts" }, facts(meta))));
  }

  /** @param {Entry} entry */
  const copy = (entry) => navigator.clipboard && entry.content !== "" && h("button", { type: "button", className: "quiet", onclick: async (/** @type {any} */ e) => {
    const button = e.currentTarget;
    await navigator.clipboard.writeText(entry.content).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Not allowed"; });
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");

  return {
    flush,
    /** @param {Entry} entry */
    add(entry) {
      const user = entry.role === "user";
      const body = h("div", { className: "body" }), foot = h("div", { className: "foot" });
      if (user) foot.append(h("button", { type: "button", className: "quiet", title: "Edit", "aria-label": "Edit this message", onclick: () => on.edit(entry) }, icon("i-edit")));
      const node = h("li", { className: `turn ${entry.role}` }, h("span", { className: "sr" }, user ? "You:" : "Model:"), body, foot);
      views.set(entry, { node, body, foot, drawn: [], status: "" });
      turns.append(node);
      by("welcome").hidden = true;
      if (user) atEnd = true;
      this.change(entry);
    },
    /** Redraws an entry in the next frame. @param {Entry} entry @param {string} [status] what an unfinished answer waits for; "" when finished */
    change(entry, status) {
      const view = views.get(entry);
      if (!view) return;
      if (status !== undefined) view.status = status;
      changed.add(entry);
      frame ||= requestAnimationFrame(flush);
    },
    /** Shows exactly these. @param {Entry[]} entries */
    show(entries) {
      for (const [entry, view] of views) if (!entries.includes(entry)) { view.node.remove(); views.delete(entry); }
      for (const entry of entries) if (!views.has(entry)) this.add(entry);
      by("welcome").hidden = entries.length > 0;
    },
  };
}
