/** Marks within a line of Markdown: code, formulas, links, bold, emphasis, struck out. Elements and text nodes only. */
import { h } from "./dom.js";
import { formula } from "./maths.js";

/** The marks, tried in this order at each place. Code first: its content is not Markdown. */
const SPAN = new RegExp([
  /(?<tick>`+)(?!`)(?<code>.+?)(?<!`)\k<tick>(?!`)/,
  // Prices are not formulas: the dollar at a formula's end has no space before it and no digit after it.
  /\$\$(?<wide>[^$]+?)\$\$/, /\$(?=[^\s$])(?<tex>[^$\n]*?[^\s$\\])\$(?![\d$])/, /\\\((?<round>.+?)\\\)/, /\\\[(?<square>.+?)\\\]/,
  /\\(?<plain>[!-/:-@[-`{-~])/,
  /!?\[(?<label>(?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?(?<target>[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^\n]*?["')])?\s*\)/,
  /<?(?<bare>https?:\/\/[^\s<>"`]*[^\s<>"`.,;:!?'*_)\]])>?/,
  // `*` only, because names_with_underscores are common.
  /\*\*(?=\S)(?<bold>.+?)(?<=\S)\*\*/, /\*(?=[^\s*])(?<em>[^*]+?)(?<=\S)\*(?!\*)/,
  /~~(?=\S)(?<struck>.+?)(?<=\S)~~/,
].map((mark) => mark.source).join("|"), "g");

/** Links may lead to web pages only: never to a script, a file or another program. @param {string} target */
function address(target) {
  try {
    const url = new URL(target);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

/** @param {string} href @param {Node[]} label */
const link = (href, label) => h("a", { href, target: "_blank", rel: "noopener noreferrer", title: href }, ...label);

/** @param {string} text @param {boolean} [linked] whether it is inside a link @returns {Node[]} */
export function inline(text, linked = false) {
  /** @type {Node[]} */
  const nodes = [];
  let end = 0;
  for (const m of text.matchAll(SPAN)) {
    const g = /** @type {Record<string, string | undefined>} */ (m.groups);
    const node = mark(m[0], g, linked);
    if (!node) continue;
    if (m.index > end) nodes.push(document.createTextNode(text.slice(end, m.index)));
    nodes.push(node);
    end = m.index + m[0].length;
  }
  if (end < text.length) nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}

/** @param {string} source @param {Record<string, string | undefined>} g the groups of the match @param {boolean} linked @returns {Node | null} null: it stays plain text */
function mark(source, g, linked) {
  const tex = g.wide ?? g.tex ?? g.round ?? g.square;
  if (g.code !== undefined) return h("code", {}, g.code.replace(/^ (.+) $/, "$1"));
  if (tex !== undefined) return formula(tex, source, { display: false, whole: true });
  if (g.plain !== undefined) return document.createTextNode(g.plain);
  if (g.target !== undefined) {
    const href = linked ? null : address(g.target);
    return href && link(href, g.label ? inline(g.label, true) : [document.createTextNode(href)]);
  }
  if (g.bare !== undefined) {
    const href = linked ? null : address(g.bare);
    return href && link(href, [document.createTextNode(g.bare)]);
  }
  if (g.bold !== undefined) return h("strong", {}, ...inline(g.bold, linked));
  if (g.em !== undefined) return h("em", {}, ...inline(g.em, linked));
  return h("del", {}, ...inline(g.struck ?? "", linked));
}
