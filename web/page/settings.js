/** The user's settings and their dialog. */
import { by, h, keep, recall } from "./dom.js";

/**
 * @typedef {object} Settings
 * @property {string} system
 * @property {boolean} prefixCache
 * @property {boolean} keepStates whether states are kept in the browser's storage
 * @property {"auto" | "wgpu" | "cpu"} backend
 * @property {"error" | "drop-oldest"} whenFull what happens when a chat outgrows the context: the page asks, or the engine leaves the oldest turns out
 * @property {Record<string, number>} sampling only values that differ from the model's defaults
 */

/** name, label, minimum, maximum, step, hint */
const NUMBERS = /** @type {const} */ ([
  ["temperature", "Temperature", 0, 5, 0.05, "0 always takes the likeliest token"],
  ["topP", "Top p", 0.001, 1, 0.01, "the likeliest tokens up to this probability"],
  ["topK", "Top k", 0, 100000, 1, "the k likeliest tokens, 0 for all"],
  ["minP", "Min p", 0, 1, 0.01, "tokens at least this times as likely as the best"],
  ["repetitionPenalty", "Repetition penalty", 0.1, 10, 0.05, "1 is off"],
  ["maxTokens", "Longest answer", 1, 1000000, 1, "in tokens"],
  ["seed", "Seed", 0, Number.MAX_SAFE_INTEGER, 1, "the same seed gives the same answer"],
]);

const STATES_HINT = "What the model made of your chats stays in this browser's storage, so that they go on after a reload without being read again. Parts that were not used for 7 days are deleted; deleting a chat leaves them.";

/** @returns {Settings} */
function load() {
  const kept = /** @type {any} */ (recall("settings", {}));
  /** @type {Record<string, number>} */
  const sampling = {};
  for (const [name, , least, most] of NUMBERS) {
    const n = kept?.sampling?.[name];
    if (typeof n === "number" && n >= least && n <= most) sampling[name] = n;
  }
  return {
    system: typeof kept.system === "string" ? kept.system : "",
    prefixCache: kept.prefixCache !== false,
    keepStates: kept.keepStates !== false,
    // "drop" is what earlier versions kept.
    whenFull: kept.whenFull === "drop-oldest" || kept.whenFull === "drop" ? "drop-oldest" : "error",
    backend: kept.backend === "wgpu" || kept.backend === "cpu" ? kept.backend : "auto",
    sampling,
  };
}

export const settings = load();
export const save = () => keep("settings", settings);

/**
 * @param {(on: boolean) => void} cacheChanged
 * @param {(on: boolean) => Promise<string>} forget deletes the kept states and keeps none from then on unless `on`; returns a sentence about it
 * @returns {(defaults: Record<string, number | undefined>) => void} opens the dialog
 */
export function settingsDialog(cacheChanged, forget) {
  const dialog = by("settings-dialog"), form = by("settings-form");
  const fields = NUMBERS.map(([name, label, min, max, step, hint]) => {
    const hintNode = h("p", { className: "hint", id: `hint-${name}` }, hint);
    const input = h("input", { id: `set-${name}`, name, type: "number", min, max, step: "any", inputMode: step < 1 ? "decimal" : "numeric", "aria-describedby": `hint-${name}` });
    by("sampling").append(h("div", {}, h("label", { htmlFor: input.id }, label), input, hintNode));
    const check = () => {
      const n = Number(input.value), whole = step === 1;
      const bad = input.validity.badInput || (input.value !== "" && (!(n >= min && n <= max) || (whole && !Number.isInteger(n))));
      input.setAttribute("aria-invalid", String(bad));
      hintNode.classList.toggle("problem", bad);
      hintNode.textContent = bad ? `A ${whole ? "whole number" : "number"} ${max < 1e5 ? `from ${min} to ${max}` : `of at least ${min}`}, please.` : hint;
      return !bad && input.value !== "";
    };
    return { name, input, check };
  });
  const system = by("set-system"), cache = by("set-cache"), states = by("set-states"), said = by("states-hint"), full = by("set-full");

  const fill = () => {
    system.value = settings.system;
    cache.checked = settings.prefixCache;
    states.checked = settings.keepStates;
    said.textContent = STATES_HINT;
    full.value = settings.whenFull;
    for (const { name, input, check } of fields) {
      input.value = settings.sampling[name] ?? "";
      check();
    }
  };
  const read = () => {
    settings.system = system.value;
    settings.whenFull = full.value;
    if (settings.prefixCache !== cache.checked) cacheChanged((settings.prefixCache = cache.checked));
    if (settings.keepStates !== states.checked) {
      settings.keepStates = states.checked;
      if (states.checked) said.textContent = "They are kept from the next time on that the model is loaded.";
      else drop(false);
    }
    settings.sampling = {};
    for (const { name, input, check } of fields) if (check()) settings.sampling[name] = Number(input.value);
    save();
  };
  const drop = async (/** @type {boolean} */ on) => {
    said.textContent = await forget(on);
  };
  by("forget-states").addEventListener("click", () => drop(settings.keepStates));
  form.addEventListener("input", read);
  by("settings-reset").addEventListener("click", () => {
    form.reset();
    read();
  });
  return (defaults) => {
    for (const { name, input } of fields) input.placeholder = name === "seed" ? "a new one" : name === "maxTokens" ? "1024" : String(defaults[name] ?? "");
    fill();
    dialog.showModal();
  };
}
