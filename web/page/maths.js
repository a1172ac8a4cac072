/** Formulas: TeX as MathML, which browsers draw without extra fonts. The converter is fetched with the first formula. */
import { h } from "./dom.js";

/** null until it is loaded, and if the page was built without it. @type {any} */
let temml = null;
/** @type {Promise<unknown> | null} */
let coming = null;

/** Characters of the longest formula: longer ones are unreadable and would block the page. */
const LONGEST = 4000;

/**
 * @param {string} tex
 * @param {string} source the original text, shown if the formula cannot be drawn
 * @param {{ display: boolean, whole: boolean }} how on a line of its own; `whole` is false while it is being written
 * @returns {HTMLElement}
 */
export function formula(tex, source, { display, whole }) {
  const node = h(display ? "div" : "span", { className: display ? "formula display" : "formula", ...(display ? { tabIndex: 0, role: "group", "aria-label": "Formula" } : {}) }, source);
  if (!whole || tex.trim() === "" || tex.length > LONGEST) return node;
  const show = () => {
    const drawn = temml && toMathml(tex.trim(), display);
    if (drawn) node.replaceChildren(drawn);
  };
  if (temml) show();
  else {
    // @ts-ignore: web/build puts it there.
    coming ??= import("./temml.js").then((module) => { temml = module.default; }, () => {});
    coming.then(show);
  }
  return node;
}

/** @param {string} tex @param {boolean} display @returns {Element | null} null if the TeX cannot be drawn */
function toMathml(tex, display) {
  try {
    // Without `trust` there are no links, images or classes in it; the limits end macros that call themselves.
    const tree = temml.__renderToMathMLTree(tex, { displayMode: display, throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 20] });
    return unstyled(tree).toNode();
  } catch {
    return null;
  }
}

/** Style attributes, which the page's policy refuses, are left out. @param {any} tree */
function unstyled(tree) {
  if (tree.attributes) delete tree.attributes.style;
  for (const child of tree.children ?? []) unstyled(child);
  return tree;
}
