/** The cache panel: reuse per turn, the prefix tree, memory, the device. Next to the chat, or a sheet on narrow screens. */
import { by, bytes, count, duration, h, keep, plural, rate, recall } from "./dom.js";
import { tree } from "./tree.js";
import { WEBGPU_HINT, backendName, explain, sentence } from "./words.js";

/** @typedef {import("./chat.js").Meta} Meta */

/**
 * A bar of parts. @param {string} label @param {number} whole @param {Record<string, number>} parts by the part's class
 */
function bar(label, whole, parts, className = "bar") {
  const spans = Object.entries(parts).filter(([, n]) => n > 0).map(([name, n]) => {
    const span = h("span", { className: name });
    span.style.width = `${(100 * n) / whole}%`;
    return span;
  });
  return h("div", { className, role: "img", "aria-label": label }, ...spans);
}

/** @param {string} name @param {{ total: number, used: number, cached: number }} pool @param {number} each bytes @param {string} what */
function meter(name, { total, used, cached }, each, what) {
  const running = used - cached, text = `${count(running)} running, ${count(cached)} kept, of ${count(total)}`;
  return total > 0 && h("div", { className: "meter" },
    h("p", {}, h("b", {}, name), h("span", {}, text)),
    bar(`${name}: ${text}`, total, { running, reused: cached }, "bar thin"),
    h("p", { className: "hint" }, `${what}, ${bytes(each)} each`));
}

/** @param {string} title @param {...(Node | false)} children */
const section = (title, ...children) => h("section", {}, h("h3", {}, title), ...children);

/** @param {(string | false)[]} parts */
const dotted = (...parts) => parts.filter(Boolean).join(" · ");

/** The times of an answer as text. @param {Meta} meta */
export const speed = ({ ttftMs, tokensPerSecond }) =>
  dotted(typeof ttftMs === "number" && `${duration(ttftMs)} to first token`, typeof tokensPerSecond === "number" && rate(tokensPerSecond));

/** @param {Meta} meta @param {number} i @param {number} longest prompt of the chat in tokens, the scale of the bars @param {boolean} old from before the load */
function turn(meta, i, longest, old) {
  const usage = /** @type {import("./js/selkie.js").Usage} */ (meta.usage), { promptTokens, reused, computed, completionTokens } = usage;
  return h("li", { className: old ? "old" : "" },
    h("p", {}, h("b", {}, `Turn ${i}`),
      h("span", {}, h("span", { className: "key reused" }, `${count(reused)} reused`), h("span", { className: "key computed" }, `${count(computed)} computed`))),
    bar(`${plural(promptTokens, "prompt token")}: ${count(reused)} reused, ${count(computed)} computed`, longest, { reused, computed }),
    h("p", { className: "hint" }, old ? `Before the model was loaded. ${explain(usage)}` : explain(usage)),
    h("p", { className: "hint" }, dotted(speed(meta), `${count(completionTokens)} written`)));
}

/**
 * @param {object} page
 * @param {() => import("./js/selkie.js").Engine | null} page.engine
 * @param {() => void} page.leave moves the focus when the sheet closes
 * @param {(text: string) => void} page.announce
 */
export function cachePanel({ engine, leave, announce }) {
  const panel = by("panel"), strip = by("strip"), toggle = by("toggle-panel"), wide = matchMedia("(min-width: 62rem)");
  const turns = h("div"), picture = h("div"), memory = h("div"), device = h("div");
  by("panel-body").append(turns, picture, memory, device);
  /** The data of the drawn tree and memory: without a change they are not redrawn, which would lose focus and scroll position. */
  let drawn = ["", ""], asking = false;

  /** Asks the engine for its statistics if the panel is visible. */
  async function refresh() {
    const e = engine();
    if (panel.hidden || asking || !e) return;
    asking = true;
    try {
      const stats = await e.stats();
      if (engine() === e) draw(stats, e.info);
    } catch { /* The engine failed or was closed, which is told elsewhere. */ }
    asking = false;
  }

  /** @param {import("./js/selkie.js").Stats} stats @param {import("./js/selkie.js").EngineInfo} info */
  function draw(stats, info) {
    const before = drawn;
    drawn = [JSON.stringify(stats.tree), JSON.stringify({ ...stats, tree: null })];
    if (drawn[0] !== before[0]) {
      const button = picture.querySelector("button");
      const focused = button !== null && button === document.activeElement;
      picture.replaceChildren(section("Prefix tree", tree(stats),
        stats.tree.length > 0 && info.from !== "server" && (button ?? h("button", { type: "button", className: "quiet", onclick: clear }, "Clear the cache"))));
      if (focused) button.focus();
    }
    if (drawn[1] === before[1]) return;
    memory.replaceChildren(section("Memory",
      meter("States", stats.slots, info.bytesPerSlot, "The memory of the recurrent layers at one point"),
      meter("Pages", stats.pages, info.bytesPerPage, "Keys and values of 64 tokens"),
      stats.disk?.bytes > 0 && h("p", { className: "hint" }, `${bytes(stats.disk.bytes)} of them are kept in the browser's storage for later.`),
      h("p", { className: "hint" }, `Since the model was loaded: ${plural(stats.reusedTokens, "prompt token")} reused, ${count(stats.computedTokens)} computed, ${count(stats.generatedTokens)} written.`)));
  }

  async function clear() {
    try {
      await engine()?.clearCache();
      announce("The cache is empty.");
    } catch { /* The engine failed or was closed, which is told elsewhere. */ }
    panel.focus();
    refresh();
  }

  /** @param {boolean} open */
  function show(open) {
    panel.hidden = !open;
    document.documentElement.dataset.panel = open ? "open" : "closed";
    for (const button of [toggle, strip]) button.setAttribute("aria-expanded", String(open));
    refresh();
  }
  /** @param {boolean} open */
  function choose(open) {
    show(open);
    if (wide.matches) keep("panel", open);
    if (open) panel.focus({ preventScroll: true });
    else if (wide.matches) toggle.focus();
    else leave();
  }
  const fit = () => show(wide.matches && recall("panel", true));
  toggle.addEventListener("click", () => choose(panel.hidden));
  strip.addEventListener("click", () => choose(true));
  by("close-panel").addEventListener("click", () => choose(false));
  panel.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => { if (event.key === "Escape") choose(false); });
  wide.addEventListener("change", fit);
  fit();

  return {
    refresh,

    /** Closes a sheet when an answer begins, because it covers the chat. */
    uncover() {
      if (!wide.matches && !panel.hidden) show(false);
    },

    /** @param {import("./chat.js").Entry[]} entries @param {WeakSet<import("./chat.js").Entry>} fresh those that were answered since the page was opened */
    turns(entries, fresh) {
      let asked = 0;
      const said = entries.flatMap((entry) => {
        if (entry.role === "user") asked++;
        return entry.meta?.usage?.reason ? [{ meta: entry.meta, turn: asked, old: !fresh.has(entry) }] : [];
      });
      const done = said.map(({ meta }) => meta), longest = Math.max(...done.map((meta) => meta.usage?.promptTokens ?? 0));
      const list = h("ol", { className: "turn-bars", tabIndex: 0, "aria-label": "Turns" }, ...said.map(({ meta, turn: i, old }) => turn(meta, i, longest, old)));
      turns.replaceChildren(section("Turns", done.length ? list
        : h("p", { className: "hint" }, "The cache keeps the text that the model has read. From the second turn on, the bars here show how much of the chat was not computed again.")));
      list.scrollTo(0, list.scrollHeight);
      const usage = done.at(-1)?.usage;
      strip.hidden = !usage;
      if (!usage) return;
      const { promptTokens, reused, computed } = usage, text = `${count(reused)} of ${plural(promptTokens, "token")} reused`, ttftMs = done.at(-1)?.ttftMs;
      strip.replaceChildren(bar(text, promptTokens, { reused, computed }), dotted(text, typeof ttftMs === "number" && duration(ttftMs)));
    },

    /** @param {import("./js/selkie.js").EngineInfo | null} info */
    device(info) {
      drawn = ["", ""];
      picture.replaceChildren();
      memory.replaceChildren();
      device.replaceChildren();
      if (!info) return;
      device.append(section("Device",
        h("p", {}, h("span", { className: "badge" }, backendName(info.backend)), " ", info.device),
        info.software && h("p", { className: "hint" }, "A graphics driver without a GPU: correct, but slow."),
        info.fallback && h("p", { className: "hint" }, `${sentence(info.fallback).text} ${isSecureContext ? WEBGPU_HINT : ""}`),
        info.diskCacheProblem && h("p", { className: "hint" }, `States are not kept for the next visit. ${sentence(info.diskCacheProblem).text}`),
        info.storageProblem && h("p", { className: "hint" }, `The model is not kept for the next visit. ${sentence(info.storageProblem).text}`),
        h("p", { className: "hint" }, `${bytes(info.weightBytes)} of weights, ${count(info.contextTokens)} tokens of context${info.from === "server" ? "" : `, loaded in ${duration(info.loadMs)}`}.`)));
      refresh();
    },
  };
}
