/** Small helpers: elements, stored values, numbers as words. Text reaches the page as text nodes only. */

/**
 * @param {string} tag
 * @param {Record<string, any>} [props] properties, attributes, and `on…` listeners; null, undefined and false are left out
 * @param {...(Node | string | null | undefined | false)} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const node = /** @type {any} */ (document.createElement(tag));
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  return put(node, ...children);
}

/**
 * Replaces the children of an element.
 * @param {any} node
 * @param {...(Node | string | null | undefined | false)} children
 */
export function put(node, ...children) {
  node.replaceChildren(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {...(Node | string)} children
 */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

/** One of the icons in index.html. @param {string} id */
export const icon = (id) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#${id}` }));

/** @param {string} id @returns {any} */
export const by = (id) => document.getElementById(id);

/** Values for as long as the page is open, if localStorage is denied or full. @type {Map<string, unknown>} */
const memory = new Map();

/** @template T @param {string} key @param {T} fallback @returns {T} */
export function recall(key, fallback) {
  if (memory.has(key)) return /** @type {T} */ (memory.get(key));
  try {
    return JSON.parse(localStorage.getItem(`selkie.${key}`) ?? "null") ?? fallback;
  } catch {
    return fallback;
  }
}

/** @param {string} key @param {unknown} value */
export function keep(key, value) {
  try {
    localStorage.setItem(`selkie.${key}`, JSON.stringify(value));
    memory.delete(key);
  } catch {
    memory.set(key, value);
  }
}

/** Copies a text. A page from a plain http address has no clipboard, but may copy the selection. @param {string} text @returns {Promise<boolean>} */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = h("textarea", { value: text, className: "sr", readOnly: true }), focused = /** @type {any} */ (document.activeElement);
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus({ preventScroll: true });
  return copied;
}

/** @param {number} n */
export function bytes(n) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let i = 0;
  for (; n >= 999.5 && i < units.length - 1; i++) n /= 1000;
  return `${i === 0 || n >= 99.95 ? Math.round(n) : n.toFixed(1)} ${units[i]}`;
}

/** @param {number} n */
export function parameters(n) {
  return n >= 1e9 ? `${(n / 1e9).toFixed(1)} billion` : n >= 1e6 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} million` : count(n);
}

/** @param {number} n */
export const count = (n) => Math.round(n).toLocaleString("en");

/** @param {number} n @param {string} one @param {string} [many] */
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** @param {number} ms */
export const duration = (ms) => (ms < 1 ? "under 1 ms" : ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`);

/** @param {number} perSecond */
export const rate = (perSecond) => `${perSecond < 10 ? perSecond.toFixed(1) : count(perSecond)} tokens/s`;
