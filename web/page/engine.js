/** The states of the engine on the page: loading with progress, ready, or failed with a remedy. */
import { by, bytes, count, h, keep, put } from "./dom.js";
import { DEMO, FIRST, SERVER, rememberFolder } from "./model.js";
import { connect, useKey } from "./server.js";
import { settings } from "./settings.js";
import { backendName, sentence } from "./words.js";

/** @typedef {import("./js/selkie.js").Engine} Engine */
/** @typedef {import("./js/selkie.js").SelkieError} SelkieError */
/** @typedef {import("./model.js").Model} Model */

/** Where text goes if the server answers. */
const ANSWERED = `Answered by ${location.host}: what you type goes to this server.`;
/** Storage for states, at most. */
const DISK_MIB = 512;
/** If the engine fails again within this time, the page does not restart it. */
const AGAIN_MS = 60_000;

// Imported on first use, so that the page is usable before the engine's module has loaded.
const imported = import("./js/selkie.js");
let broken = false;
imported.catch(() => { broken = true; });
export const api = () => imported;

/**
 * @param {object} page
 * @param {(engine: Engine | null) => void} page.changed called when a load begins (null) and when it succeeds
 * @param {() => void} page.choose opens the dialog for models
 * @param {() => void} page.focus
 * @param {(text: string) => void} page.announce
 */
export function engineLife(page) {
  const card = by("load"), root = document.documentElement, state = by("model-state"), badge = by("model-badge"), foot = by("foot");
  const life = {
    model: FIRST,
    /** @type {Engine | null} */
    engine: null,
    start, settled,
  };
  /** The current load, running or finished. @type {Promise<Engine>} */
  let ready;
  let begin = () => {};
  const begun = new Promise((ok) => { begin = () => ok(null); });
  let loading = new AbortController();
  /** When the page last restarted the engine. */
  let again = -Infinity;

  /**
   * @param {Model} model @param {import("./js/selkie.js").Backend} [backend]
   * @param {boolean} [remember] whether the next visit begins with it
   */
  function start(model, backend = settings.backend, remember = true) {
    loading.abort();
    life.engine?.close();
    life.engine = null;
    life.model = model;
    const mine = (loading = new AbortController());
    root.dataset.engine = "loading";
    by("model-name").textContent = model.name;
    state.textContent = "loading";
    badge.hidden = true;
    foot.textContent = model === SERVER ? ANSWERED : "Runs in this page. Nothing you type leaves your device.";
    by("where").textContent = model === SERVER ? "The model of this server answers here." : "A small language model runs right here in the page. Nothing you type leaves your device.";
    card.replaceChildren();
    show(null);
    page.changed(null);
    ready = load(model, backend, mine);
    begin();
    ready.then(
      (engine) => { if (mine === loading) loaded(engine, remember); else engine.close(); },
      (error) => { if (mine === loading) failed(error, backend, false); });
  }

  /** @param {Model} model @param {import("./js/selkie.js").Backend} backend @param {AbortController} mine */
  async function load(model, backend, mine) {
    if (model === SERVER) return connect(mine.signal);
    let frame = 0;
    /** @type {import("./js/selkie.js").Progress | null} */
    let latest = null;
    try {
      return await (await imported).load({
        model: model.source, backend, prefixCache: settings.prefixCache, diskCacheMiB: settings.keepStates ? DISK_MIB : 0, signal: mine.signal,
        onProgress(progress) {
          latest = progress;
          frame ||= requestAnimationFrame(() => {
            frame = 0;
            if (mine === loading) show(latest);
          });
        },
      });
    } finally {
      cancelAnimationFrame(frame);
    }
  }

  /** @param {Engine} engine @param {boolean} remember */
  function loaded(engine, remember) {
    const { info } = engine, { model } = life;
    life.engine = engine;
    if (model === SERVER) by("model-name").textContent = model.name = /** @type {string} */ (info.name);
    root.dataset.engine = "ready";
    card.hidden = true;
    badge.hidden = false;
    badge.textContent = backendName(info.backend);
    state.textContent = "";
    foot.textContent = model === SERVER ? `${ANSWERED} It runs on ${info.device}.` : !isSecureContext ? `Runs on your CPU: at a plain http address a browser offers no WebGPU, models are not kept and the page does not open offline. Use https, or localhost on the machine itself.`
      : info.fallback ? `Runs on your CPU: ${sentence(info.fallback).text}`
      : info.software ? `Runs on ${info.device}, a graphics driver without a GPU: correct, but slow.`
      : `Runs on ${info.device}. Nothing you type leaves your device.`;
    // A folder's name, so that a later visit can name the missing folder.
    if (remember) keep("model", "files" in model.source ? { folder: model.name } : "url" in model.source && model !== DEMO ? model.source.url : null);
    rememberFolder(model);
    page.announce(`${model.name} is ready.`);
    page.changed(engine);
    engine.failed.then((error) => { if (life.engine === engine) lost(error, info.backend); });
    if (performance.now() - again < AGAIN_MS) {
      foot.textContent = "The engine stopped with an error and was restarted.";
      page.announce(foot.textContent);
    }
  }

  /** Replaces a worker whose engine trapped (a chat template can cause that), but not repeatedly. @param {SelkieError} error @param {import("./js/selkie.js").Backend} backend */
  function lost(error, backend) {
    if (error.code !== "internal" || performance.now() - again < AGAIN_MS) return failed(error, backend, true);
    again = performance.now();
    start(life.model);
  }

  /** @param {unknown} error @param {import("./js/selkie.js").Backend} backend that was tried @param {boolean} lost whether it had worked before */
  function failed(error, backend, lost) {
    const why = sentence(error), { model } = life;
    life.engine?.close();
    life.engine = null;
    ready = Promise.reject(error);
    ready.catch(() => {});
    root.dataset.engine = "failed";
    badge.hidden = true;
    state.textContent = "not loaded";
    const choice = (/** @type {string} */ text, /** @type {() => void} */ go, main = false) =>
      h("button", { type: "button", className: main ? "primary" : "", onclick: () => { page.focus(); go(); } }, text);
    // For errors that the GPU may have caused.
    const causes = ["device_lost", "out_of_memory", "too_large", "internal", ...(backend === "wgpu" ? ["unsupported"] : [])];
    const ofGpu = backend !== "cpu" && causes.includes(why.code);
    card.hidden = false;
    card.replaceChildren(h("div", { role: "alert" },
      h("p", { className: "problem" }, h("b", {}, lost ? "The model stopped. " : `${model.name} could not be loaded. `), `${why.text} ${why.advice}`),
      why.code === "key" && keyForm(),
      h("div", { className: "row" },
        ofGpu && choice("Reload on the CPU", () => start(model, "cpu"), true),
        choice("Try again", () => (broken ? location.reload() : start(model, lost ? undefined : backend))),
        model !== DEMO && choice("Use the demo model", () => start(DEMO)),
        choice("Choose a model…", page.choose))));
  }

  /** Asks for the key of a server that wants one. */
  function keyForm() {
    const key = h("input", { type: "password", autocomplete: "current-password", "aria-label": "Key for this server" });
    const onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      useKey(key.value.trim());
      page.focus();
      start(SERVER);
    };
    return h("form", { className: "row", onsubmit }, key, h("button", { type: "submit", className: "primary" }, "Use this key"));
  }

  /** @param {import("./js/selkie.js").Progress | null} progress */
  function show(progress) {
    const { stage, loaded = 0, total = 0 } = progress ?? {};
    const name = life.model === DEMO ? "the demo model" : life.model === SERVER ? "the server's model" : life.model.name;
    const amount = (/** @type {(n: number) => string} */ unit) => (total ? `${unit(loaded)} of ${unit(total)}` : unit(loaded));
    const text = stage === "download" ? `Downloading ${name}: ${amount(bytes)}`
      : stage === "weights" ? `Loading the weights: ${amount(bytes)}`
      : stage === "pipelines" ? `Preparing the device: ${amount(count)}`
      : `Starting ${name}…`;
    card.hidden = false;
    if (!card.querySelector("progress")) {
      put(card, h("p"), h("progress", { "aria-label": "Loading the model" }),
        life.model !== DEMO && h("button", { type: "button", className: "quiet", onclick: () => start(DEMO) }, "Cancel"));
      page.announce(text);
    }
    card.querySelector("p").textContent = text;
    const bar = /** @type {HTMLProgressElement} */ (card.querySelector("progress"));
    if (total) {
      bar.max = total;
      bar.value = Math.min(loaded, total);
    } else bar.removeAttribute("value");
  }

  /** The engine, as soon as any load succeeds. @returns {Promise<Engine>} */
  async function settled() {
    await begun;
    for (;;) {
      const one = ready;
      try {
        return await one;
      } catch (error) {
        if (one === ready) throw error;
      }
    }
  }

  return life;
}
