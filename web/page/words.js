/** Sentences for the engine's reports: the reason why reuse ended, failures, and advice. */
import { count } from "./dom.js";

/** Tokens of a page of the prefix tree. */
export const PAGE = 64;

/** @param {import("./js/selkie.js").Usage} usage */
export function explain(usage) {
  const loaded = usage.diskTokens > 0 ? ` ${count(usage.diskTokens)} tokens were loaded from the browser's storage.` : "";
  return why(usage) + loaded;
}

/** @param {import("./js/selkie.js").Usage} usage */
function why({ promptTokens, matched, reused, reason }) {
  // The last token of a prompt is always computed.
  if (reason === "off") return "The cache is turned off in the settings.";
  if (promptTokens <= PAGE) return `Reuse starts at ${PAGE} tokens; this prompt has ${count(promptTokens)}.`;
  switch (reason) {
    case "evicted": return "More of it was cached before, but was removed for lack of room.";
    case "host":
    case "disk": return "More of it is kept, but computing it was faster than loading it.";
    case "policy": return "More of it is cached, but its state was replaced by a newer one.";
    case "no_state": return `${count(matched)} tokens are cached, but ${reused ? `the last state to continue from is at ${count(reused)}` : "no state to continue from was kept"}.`;
    case "full": return `Every whole block of ${PAGE} tokens was reused.`;
    case "first_sight": return reused ? `Everything after the first ${count(reused)} tokens is new.` : "All of it is new.";
    default: return "";
  }
}

/** Advice for errors whose message has none. @type {Record<string, string>} */
const ADVICE = {
  too_large: "A smaller model fits; a GPU and the CPU have different limits.",
  device_lost: "That happens when a driver restarts or memory runs short. The chat is still here.",
  out_of_memory: "Close other tabs, or choose a smaller model.",
};

/**
 * @param {unknown} error
 * @returns {{ code: string, text: string, advice: string }}
 */
export function sentence(error) {
  const code = String(/** @type {any} */ (error)?.code ?? "internal");
  let text = (error instanceof Error ? error.message : String(error)).trim() || "Something went wrong.";
  text = text.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase());
  if (!/[.!?]$/.test(text)) text += ".";
  return { code, text, advice: ADVICE[code] ?? "" };
}

/** Advice for a browser without WebGPU. */
export const WEBGPU_HINT = "WebGPU comes with current Chrome, Edge, Safari and Firefox; on Linux it may have to be turned on, in Chrome at chrome://flags/#enable-unsafe-webgpu.";

/** @param {string} backend */
export const backendName = (backend) => ({ wgpu: "WebGPU", cuda: "CUDA" })[backend] ?? "CPU";
