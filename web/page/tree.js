/** The prefix tree as a picture: token positions to the right, branches downwards. */
import { h, plural, svg } from "./dom.js";

/** @typedef {import("./js/selkie.js").TreeNode} TreeNode */
/** @typedef {{ node: TreeNode, children: Spot[], hidden: number, x: number, y: number }} Spot */

const STEP = 26, ROW = 26, LEFT = 14, TOP = 16;

/**
 * Links nodes with their children; in a deep tree, a run of nodes without a state becomes one edge with a count.
 * @param {TreeNode[]} nodes parents before children
 */
function shape(nodes) {
  /** @type {Map<string, Spot>} */
  const spots = new Map();
  /** @type {Spot[]} */
  const roots = [];
  for (const node of nodes) {
    const spot = { node, children: [], hidden: 0, x: 0, y: 0 };
    spots.set(node.id, spot);
    (node.parent === null ? roots : spots.get(node.parent)?.children ?? roots).push(spot);
  }
  const deep = nodes.some((n) => n.tokens > 12 * 64);
  /** @param {Spot} spot @returns {Spot} */
  const shorten = (spot) => {
    let end = spot, hidden = 0;
    while (deep && !end.node.hasState && end.children.length === 1) {
      end = end.children[0];
      hidden++;
    }
    if (hidden > 2) {
      end.hidden = hidden;
      spot = end;
    }
    spot.children = spot.children.map(shorten);
    return spot;
  };
  return roots.map(shorten);
}

/** @param {import("./js/selkie.js").Stats} stats */
export function tree(stats) {
  if (stats.tree.length === 0) return h("p", { className: "hint" }, "Empty. Each block of 64 tokens that was computed becomes a node.");
  let row = 0, width = 0;
  const edges = svg("g", { class: "edges" }), dots = svg("g"), labels = svg("g", { class: "labels" });

  /** @param {Spot} spot @param {number} fromX @param {number} fromY */
  const place = (spot, fromX, fromY) => {
    spot.x = fromX + STEP * (spot.hidden ? 2 : 1);
    spot.y = TOP + ROW * row;
    width = Math.max(width, spot.x);
    const bend = spot.y === fromY ? `M${fromX} ${fromY}H${spot.x}` : `M${fromX} ${fromY}v${spot.y - fromY - 7}q0 7 7 7H${spot.x}`;
    edges.append(svg("path", { d: bend, ...(spot.hidden ? { class: "folded" } : {}) }));
    if (spot.hidden) labels.append(svg("text", { x: spot.x - STEP, y: spot.y - 6 }, `+${spot.hidden}`));
    const { tokens, hasState, inUse } = spot.node;
    const what = `Tokens ${tokens - 63} to ${tokens}: ${hasState ? "state kept" : "no state"}${inUse ? ", in use" : ""}`;
    dots.append(svg("g", {}, svg("title", {}, what),
      ...(inUse ? [svg("circle", { cx: spot.x, cy: spot.y, r: 9, class: "in-use" })] : []),
      svg("circle", { cx: spot.x, cy: spot.y, r: 5.5, class: hasState ? "state" : "plain" })));
    spot.children.forEach((child, i) => {
      if (i) row++;
      place(child, spot.x, spot.y);
    });
  };
  shape(stats.tree).forEach((root, i) => {
    if (i) row++;
    place(root, LEFT, TOP);
  });
  dots.append(svg("rect", { x: LEFT - 4, y: TOP - 4, width: 8, height: 8, rx: 2, class: "root" }));

  const w = width + 14, height = TOP * 2 + ROW * row;
  const states = stats.tree.filter((n) => n.hasState).length, used = stats.tree.filter((n) => n.inUse).length;
  const summary = `${plural(stats.treeNodes, "block")} of 64 tokens, ${states} with a state to continue from, ${used} in use`;
  const picture = svg("svg", { viewBox: `0 0 ${w} ${height}`, width: w, height, role: "img", "aria-label": `Prefix tree: ${summary}` }, edges, labels, dots);
  const key = (/** @type {string} */ kind, /** @type {string} */ text) => h("span", { className: `key ${kind}` }, text);
  return h("div", { className: "tree" }, h("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Prefix tree" }, picture),
    h("p", { className: "legend hint" }, key("state", "state kept"), key("plain", "text known"), key("in-use", "in use")),
    h("p", { className: "hint" }, `${summary[0].toUpperCase()}${summary.slice(1)}${stats.treeNodes > stats.tree.length ? `; the ${stats.tree.length} used last are shown` : ""}.`));
}
