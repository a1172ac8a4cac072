/**
 * The Markdown that chat models write, drawn as elements and text nodes, never as HTML from text. Unknown syntax is shown as
 * plain text. Reasoning between `<think>` marks is folded.
 */
import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { inline } from "./inline.js";
import { formula } from "./maths.js";

/**
 * The state of a drawn answer: the sources of its blocks, and of those of its reasoning.
 * @typedef {{ blocks: string[], thought: { node: any, inside: any, drawn: string[] } | null }} Drawn
 */

/** @returns {Drawn} */
export const nothingDrawn = () => ({ blocks: [], thought: null });

/**
 * Splits an answer into its reasoning and the rest. Some templates write the opening mark, so the model only closes it.
 * @param {string} text
 * @returns {{ thought: string | null, thinking: boolean, rest: string }}
 */
export function parts(text) {
  const open = /^\s*<think>\n?/.exec(text), close = text.indexOf("</think>");
  if (!open && close < 0) return { thought: null, thinking: false, rest: text };
  const start = open ? open[0].length : 0;
  if (close < 0) return { thought: text.slice(start), thinking: true, rest: "" };
  return { thought: text.slice(start, close), thinking: false, rest: text.slice(close + "</think>".length).trimStart() };
}

/**
 * Draws `text` into `parent`, which holds the last drawing; only blocks that changed are drawn again.
 * @param {HTMLElement} parent
 * @param {string} text
 * @param {Drawn} drawn updated
 * @param {number} [until] the time (of performance.now()) at which it stops
 * @returns {boolean} whether all of it is drawn
 */
export function draw(parent, text, drawn, until = Infinity) {
  const { thought, thinking, rest } = parts(text);
  let done = true;
  if (thought === null || thought.trim() === "") {
    drawn.thought?.node.remove();
    drawn.thought = null;
  } else {
    if (!drawn.thought) {
      const inside = h("div", { className: "thought" });
      const node = h("details", { className: "think" }, h("summary"), inside);
      drawn.thought = { node, inside, drawn: [] };
      parent.prepend(node);
    }
    drawn.thought.node.firstChild.textContent = thinking ? "Thinking…" : "Reasoning";
    done = drawBlocks(drawn.thought.inside, thought, drawn.thought.drawn, 0, until);
  }
  return drawBlocks(parent, rest, drawn.blocks, drawn.thought ? 1 : 0, until) && done;
}

/**
 * @param {HTMLElement} parent @param {string} text @param {string[]} drawn @param {number} first index of the first block's element
 * @param {number} until @returns {boolean}
 */
function drawBlocks(parent, text, drawn, first, until) {
  const now = blocks(text);
  for (const [i, source] of now.entries()) {
    if (drawn[i] === source) continue;
    if (performance.now() > until) return false;
    const node = block(source, i + 1 < now.length);
    if (first + i < parent.children.length) parent.children[first + i].replaceWith(node);
    else parent.append(node);
    drawn[i] = source;
  }
  while (parent.children.length > first + now.length) parent.lastElementChild?.remove();
  drawn.length = now.length;
  return true;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
/** Formulas on lines of their own: how they begin and end. */
const DISPLAY = /** @type {const} */ ([[/^\s*\$\$/, /\$\$\s*$/], [/^\s*\\\[/, /\\\]\s*$/]]);
const displayed = (/** @type {string} */ line) => DISPLAY.find(([begin]) => begin.test(line));
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^#{1,6}\s/;
const DIVIDER = /^ {0,3}\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;

/**
 * Splits a text into blocks that are drawn separately: a complete block does not change while the text grows.
 * @param {string} text
 */
function blocks(text) {
  /** @type {string[]} */
  const found = [];
  /** @type {string[]} */
  let lines = [];
  /** Whether a line ends the fence or formula that it is in. @type {((line: string) => boolean) | null} */
  let ends = null;
  const flush = () => {
    if (lines.length) found.push(lines.join("\n"));
    lines = [];
  };
  const alone = (/** @type {string} */ line) => {
    flush();
    found.push(line);
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1] ?? "", display = mark || ends ? undefined : displayed(line);
    if (ends) {
      lines.push(line);
      if (ends(line)) { ends = null; flush(); }
    } else if (mark) {
      flush();
      ends = (other) => { const m = FENCE.exec(other)?.[1] ?? ""; return m.startsWith(mark) && other.trim() === m; };
      lines.push(line);
    } else if (display) {
      flush();
      lines.push(line);
      if (display[1].test(line.replace(display[0], ""))) flush();
      else ends = (other) => display[1].test(other);
    } else if (HEADING.test(line) || RULE.test(line)) alone(line);
    else if (line.trim() === "") flush();
    else lines.push(line);
  }
  flush();
  return found;
}

const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** Maximum depth of nested quotes. */
const DEEPEST = 8;

/** @param {string} source @param {boolean} whole whether nothing will be added @param {number} [depth] @returns {HTMLElement} */
function block(source, whole, depth = 0) {
  const lines = source.split("\n");
  const fence = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && (lines.at(-1) ?? "").trim().startsWith(fence[1]);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), fence[2], closed || whole);
  }
  const display = displayed(lines[0]);
  if (display) {
    const [begin, end] = display, inside = source.replace(begin, "");
    return formula(inside.replace(end, ""), source, { display: true, whole: end.test(inside) });
  }
  if (RULE.test(source)) return h("hr");
  const heading = lines.length === 1 && /^(#{1,6})\s+(.*?)(\s+#+)?\s*$/.exec(source);
  if (heading) return h("p", { className: `heading level-${heading[1].length}`, dir: "auto" }, ...inline(heading[2]));
  if (depth < DEEPEST && lines.every((l) => l.startsWith(">"))) {
    const inside = lines.map((l) => l.replace(/^> ?/, "")).join("\n");
    return h("blockquote", {}, ...blocks(inside).map((b) => block(b, whole, depth + 1)));
  }
  // A list or a table often follows its introduction without an empty line between.
  const first = lines.findIndex((l, i) => ITEM.test(l) || isTable(lines, i));
  if (first > 0) return h("div", {}, paragraph(lines.slice(0, first)), block(lines.slice(first).join("\n"), whole, depth));
  if (first === 0) return ITEM.test(lines[0]) ? list(lines) : table(lines, whole, depth);
  return paragraph(lines);
}

/** @param {string[]} lines */
function paragraph(lines) {
  return h("p", { dir: "auto" }, ...lines.flatMap((line, i) => (i ? [h("br"), ...inline(line)] : inline(line))));
}

/** @param {string} line */
function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  // A bar within code, or after a backslash, divides nothing.
  const found = inside.match(/(?:\\.|`[^`]*`|[^|\\]|\\$)+|(?<=\|)(?=\|)|^(?=\|)|(?<=\|)$/g) ?? [""];
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string[]} lines @param {number} i */
function isTable(lines, i) {
  return lines[i].includes("|") && DIVIDER.test(lines[i + 1] ?? "") && cells(lines[i]).length === cells(lines[i + 1]).length;
}

/** @param {string[]} lines the first two are head and divider @param {boolean} whole @param {number} depth @returns {HTMLElement} */
function table(lines, whole, depth) {
  const sides = cells(lines[1]).map((cell) => (/^:-+:$/.test(cell) ? "center" : cell.endsWith(":") ? "end" : ""));
  const end = lines.findIndex((line, i) => i > 1 && !line.includes("|")), rows = lines.slice(2, end < 0 ? undefined : end);
  const row = (/** @type {"th" | "td"} */ tag, /** @type {string} */ line) => {
    const found = cells(line);
    return h("tr", {}, ...sides.map((side, i) => h(tag, { className: side, dir: "auto", ...(tag === "th" ? { scope: "col" } : {}) }, ...inline(found[i] ?? ""))));
  };
  // Wide tables scroll, also by keyboard.
  const drawn = h("div", { className: "table", tabIndex: 0, role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", lines[0])), h("tbody", {}, ...rows.map((line) => row("td", line)))));
  return end < 0 ? drawn : h("div", {}, drawn, block(lines.slice(end).join("\n"), whole, depth));
}

/** @param {string[]} lines the first is an item @returns {HTMLElement} */
function list(lines) {
  const [, indent, mark] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[0]));
  /** @type {string[][]} */
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items[items.length - 1].push(line);
  }
  const ordered = /\d/.test(mark);
  const children = items.map(([text, ...rest]) => {
    const at = rest.findIndex((l) => ITEM.test(l));
    const own = at < 0 ? rest : rest.slice(0, at);
    const task = /^\[([ xX])\]\s+/.exec(text);
    const said = [task ? text.slice(task[0].length) : text, ...own.map((l) => l.trim())].join(" ");
    const box = task && h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "Not done" : "Done" });
    return h("li", { className: task ? "task" : "", dir: "auto" }, box, ...inline(said), at < 0 ? null : list(rest.slice(at)));
  });
  return h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}, ...children);
}
