// Names of options: an unknown one is refused, because a mistyped one would otherwise be ignored silently.

import { SelkieError } from "./errors.js";

export const LOAD = ["model", "backend", "prefixCache", "memoryMiB", "diskCacheMiB", "contextTokens", "maxBatch", "speculate", "drafts", "onProgress", "signal"];
export const INSPECT = ["backend", "signal"];
export const GENERATE = [
  "messages", "prompt", "maxTokens", "stop", "namespace", "temperature", "topK", "topP", "minP", "repetitionPenalty", "seed",
  "whenFull", "origin",
];
export const SAVE_STATE = ["messages", "prompt", "namespace", "origin", "states"];
export const LOAD_STATE = ["namespace", "exactOnly"];

// Rejects anything but an object, and names that are not among `known`.
export function checkOptions(call, given, known) {
  if (given === null || typeof given !== "object" || Array.isArray(given)) {
    throw new SelkieError("bad_request", `${call} takes an object of options: ${known.join(", ")}.`);
  }
  for (const name of Object.keys(given)) {
    if (known.includes(name) || given[name] === undefined) continue;
    const near = nearest(name, known);
    const hint = near ? `did you mean "${near}"?` : `there are ${known.join(", ")}.`;
    throw new SelkieError("bad_request", `${call} has no option "${name}"; ${hint}`);
  }
}

// The known name that is meant: the same letters ("max_tokens"), else one that differs in a third of its letters at most.
function nearest(name, known) {
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const ranked = known.map((other) => ({ other, apart: distance(plain(name), plain(other)) })).sort((a, b) => a.apart - b.apart);
  return ranked[0].apart <= ranked[0].other.length / 3 ? ranked[0].other : null;
}

// Letters to insert, delete or change to get from `a` to `b`.
function distance(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      next.push(Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
    }
    row = next;
  }
  return row[b.length];
}
