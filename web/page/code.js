/** Blocks of code: the language's name, a button to copy, and light highlighting. */
import { copyText, h } from "./dom.js";

/** Longer code stays plain, so that drawing it takes no noticeable time. */
const LONGEST = 20_000;

const KEYWORDS = new Set(("abstract and as assert async await break case catch class const constructor continue def default defer del delete do done echo elif else end enum esac except export " +
  "extends extern false fi final finally fn for from func function go goto if impl implements import in instanceof interface is lambda let local loop match mod module move mut namespace new nil " +
  "None True False none not null nullptr of or override package pass private protected pub public raise ref return select self static struct super switch then this throw throws trait true try type typedef typeof " +
  "undefined union unless unsafe until use using var virtual void volatile when where while with yield").split(" "));
/** Words of SQL, in any case. */
const SQL = new Set(("select from where insert into values update set delete create table alter drop join left right inner outer on group by order having limit as and or not null primary key " +
  "distinct union all index view case when then else end is in like between").split(" "));

/** How comments begin: after `#`, after `--`, or as in C. @param {string} language */
function comments(language) {
  if (/^(py|python|sh|bash|shell|zsh|console|ruby|rb|yaml|yml|toml|ini|perl|pl|r|julia|jl|makefile|make|dockerfile|cmake|elixir|ex|nix|conf|powershell|ps1)$/.test(language)) return "#.*";
  if (/^(sql|lua|haskell|hs|ada|vhdl)$/.test(language)) return "--.*";
  if (/^(html|xml|svg|vue)$/.test(language)) return "<!--[\\s\\S]*?(?:-->|$)";
  if (/^(css)$/.test(language)) return "/\\*[\\s\\S]*?(?:\\*/|$)";
  return "//.*|/\\*[\\s\\S]*?(?:\\*/|$)";
}

/** Names that are not programming languages. */
const PLAIN = /^(text|txt|plain|plaintext|output|log|markdown|md|diff|csv|mermaid)?$/;

/** @param {string} code @param {string} language @returns {(Node | string)[]} */
function highlight(code, language) {
  if (PLAIN.test(language) || code.length > LONGEST) return [code];
  const triple = /^py/.test(language) ? `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|` : "";
  const tokens = new RegExp(`(?<comment>${comments(language)})|(?<string>${triple}"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\.|[^\`\\\\])*\`)` +
    "|(?<number>\\b\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?\\w*)|(?<word>[A-Za-z_$][\\w$]*)", "g");
  const sql = language === "sql", known = (/** @type {string} */ word) => (sql ? SQL.has(word.toLowerCase()) : KEYWORDS.has(word));
  /** @type {(Node | string)[]} */
  const nodes = [];
  let end = 0;
  for (const m of code.matchAll(tokens)) {
    const g = /** @type {Record<string, string | undefined>} */ (m.groups);
    const kind = g.comment !== undefined ? "comment" : g.string !== undefined ? "string" : g.number !== undefined ? "number" : known(g.word ?? "") ? "keyword" : "";
    if (!kind) continue;
    nodes.push(code.slice(end, m.index), h("span", { className: `hl-${kind}` }, m[0]));
    end = m.index + m[0].length;
  }
  nodes.push(code.slice(end));
  return nodes;
}

/**
 * @param {string} code
 * @param {string} language its name in the text, or ""
 * @param {boolean} whole whether it is complete: only then is it highlighted, once
 * @returns {HTMLElement}
 */
export function codeBlock(code, language, whole) {
  const named = language.toLowerCase();
  return h("div", { className: "code" },
    h("div", { className: "code-head" }, h("span", {}, language || "code"), copyButton(() => code, "Copy the code")),
    h("pre", { tabIndex: 0 }, h("code", { dir: "ltr" }, ...(whole ? highlight(code, named) : [code]))));
}

/** A button that copies a text and says so. @param {() => string} text @param {string} label for screen readers */
export function copyButton(text, label) {
  return h("button", { type: "button", className: "quiet", "aria-label": label, onclick: async (/** @type {any} */ event) => {
    const button = event.currentTarget;
    button.textContent = (await copyText(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
}
