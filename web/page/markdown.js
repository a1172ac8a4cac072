/**
 * The little Markdown that chat models write: paragraphs, headings, lists, quotes, code, bold and emphasis. What it does not
 * know stays as it was written. It makes elements and text nodes, never HTML from text, and no links or images.
 */
import { h } from "./dom.js";

/**
 * Cuts a text into blocks that can be drawn one by one: a block that is complete never changes while the text grows.
 * @param {string} text
 */
export function blocks(text) {
  /** @type {string[]} */
  const found = [];
  /** @type {string[]} */
  let lines = [];
  let fence = "";
  const flush = () => {
    if (lines.length) found.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^ {0,3}(`{3,}|~{3,})/.exec(line)?.[1] ?? "";
    if (fence) {
      lines.push(line);
      if (mark.startsWith(fence) && line.trim() === mark) { fence = ""; flush(); }
    } else if (mark) {
      flush();
      fence = mark;
      lines.push(line);
    } else if (/^#{1,6}\s/.test(line)) {
      flush();
      found.push(line);
    } else if (line.trim() === "") flush();
    else lines.push(line);
  }
  flush();
  return found;
}

/**
 * Draws `text` into `parent`, whose children are the blocks drawn last time; only blocks that changed are made anew.
 * @param {HTMLElement} parent
 * @param {string} text
 * @param {string[]} drawn sources of the present children; updated
 */
export function draw(parent, text, drawn) {
  const now = blocks(text);
  now.forEach((source, i) => {
    if (drawn[i] === source) return;
    const node = block(source);
    if (i < parent.children.length) parent.children[i].replaceWith(node);
    else parent.append(node);
    drawn[i] = source;
  });
  while (parent.children.length > now.length) parent.lastElementChild?.remove();
  drawn.length = now.length;
}

const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;

/** Quotes within quotes that are drawn as such. */
const DEEPEST = 8;

/** @param {string} source @param {number} [depth] @returns {HTMLElement} */
function block(source, depth = 0) {
  const lines = source.split("\n");
  const fence = /^ {0,3}(`{3,}|~{3,})/.exec(lines[0])?.[1];
  if (fence) {
    const closed = lines.length > 1 && (lines.at(-1) ?? "").trim().startsWith(fence);
    return h("pre", { tabIndex: 0 }, h("code", {}, lines.slice(1, closed ? -1 : undefined).join("\n")));
  }
  const heading = lines.length === 1 && /^(#{1,6})\s+(.*)$/.exec(source);
  if (heading) return h("p", { className: "heading" }, ...inline(heading[2]));
  if (depth < DEEPEST && lines.every((l) => l.startsWith(">"))) {
    return h("blockquote", {}, block(lines.map((l) => l.replace(/^> ?/, "")).join("\n"), depth + 1));
  }
  if (ITEM.test(lines[0])) return list(lines);
  // A list often follows its introduction without an empty line between.
  const first = lines.findIndex((l) => ITEM.test(l));
  if (first > 0) return h("div", {}, paragraph(lines.slice(0, first)), list(lines.slice(first)));
  return paragraph(lines);
}

/** @param {string[]} lines */
function paragraph(lines) {
  return h("p", {}, ...lines.flatMap((line, i) => (i ? [h("br"), ...inline(line)] : inline(line))));
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
    return h("li", {}, ...inline([text, ...own.map((l) => l.trim())].join(" ")), at < 0 ? null : list(rest.slice(at)));
  });
  return h(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}, ...children);
}

/** @param {string} text @returns {Node[]} */
function inline(text) {
  /** @type {Node[]} */
  const nodes = [];
  // Code first: what is inside is not Markdown. `*` only, because names_with_underscores are common.
  const span = /(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|\*(?=[^\s*])([^*]+?)(?<=\S)\*(?!\*)/g;
  let end = 0;
  for (const m of text.matchAll(span)) {
    if (m.index > end) nodes.push(document.createTextNode(text.slice(end, m.index)));
    if (m[2] !== undefined) nodes.push(h("code", {}, m[2].replace(/^ (.+) $/, "$1")));
    else if (m[3] !== undefined) nodes.push(h("strong", {}, ...inline(m[3])));
    else nodes.push(h("em", {}, ...inline(m[4])));
    end = m.index + m[0].length;
  }
  if (end < text.length) nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}
