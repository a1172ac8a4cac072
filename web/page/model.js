/** The dialog to choose a model: the demo, a folder, an address, or a stored one. It says before loading whether a model fits. */
import { bytes, by, count, h, parameters, put, recall } from "./dom.js";
import { modelUrl } from "./js/source.js";
import { hasModel } from "./server.js";
import { save, settings } from "./settings.js";
import { handles } from "./store.js";
import { backendName, sentence } from "./words.js";

/** @typedef {import("./js/selkie.js").ModelSource} ModelSource */
/** `handle`: of its folder, if the browser supplies one. @typedef {{ source: ModelSource | { server: true }, name: string, handle?: any }} Model */

const DEMO_URL = new URL("models/demo/", document.baseURI).href;
/** @type {Model} */
export const DEMO = { source: { url: DEMO_URL }, name: "Demo model" };
/** The model of the server that the page came from; its name comes with the first answer. @type {Model} */
export const SERVER = { source: { server: true }, name: "The server's model" };
/** What a new visitor gets. */
export const FIRST = hasModel ? SERVER : DEMO;

/** A readable name. @param {string} address */
export function modelName(address) {
  if (address === DEMO_URL) return DEMO.name;
  const url = new URL(address), parts = url.pathname.split("/").filter(Boolean);
  return url.hostname === "huggingface.co" ? parts.slice(0, 2).join("/") : decodeURIComponent(parts.at(-1) ?? url.host);
}

/**
 * The files of the outermost folder that has a config.json. Folders inside it hold copies in other formats.
 * @param {{ path: string, file: File }[]} found
 * @returns {Model}
 */
function folder(found) {
  const depth = (/** @type {string} */ p) => p.split("/").length;
  const config = found.filter((f) => /(^|\/)config\.json$/.test(f.path)).sort((a, b) => depth(a.path) - depth(b.path))[0];
  const at = config?.path.replace(/config\.json$/, "");
  const files = at === undefined ? found : found.filter((f) => f.path.startsWith(at) && !f.path.slice(at.length).includes("/"));
  return { source: { files: files.map((f) => f.file) }, name: at?.split("/").at(-2) || "Your model" };
}

/** @param {DataTransfer} data @returns {Promise<Model>} */
export function dropped(data) {
  /** @type {{ path: string, file: File }[]} */
  const found = [];
  /** @param {any} entry @returns {Promise<unknown>} */
  const walk = (entry) => {
    const path = entry.fullPath.replace(/^\//, "");
    if (entry.isFile) return new Promise((ok, no) => entry.file((/** @type {File} */ file) => ok(found.push({ path, file })), no));
    const reader = entry.createReader();
    /** @returns {Promise<unknown>} */
    const more = () => /** @type {Promise<any[]>} */ (new Promise((ok, no) => reader.readEntries(ok, no)))
      .then((/** @type {any[]} */ batch) => batch.length ? Promise.all(batch.map(walk)).then(more) : null);
    return path.split("/").length > 3 ? Promise.resolve() : more();
  };
  // The entries become invalid when this function returns to the browser, so take all of them before waiting.
  const entries = [...data.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  return Promise.all(entries.map(walk)).then(() => folder(found));
}

/** Models to begin with: name, size, licence and strength. */
const STARTERS = /** @type {const} */ ([
  ["HuggingFaceTB/SmolLM2-135M-Instruct", "269 MB", "Apache 2.0", "small and quick"],
  ["ibm-granite/granite-4.0-h-350m", "681 MB", "Apache 2.0", "hybrid: long chats stay cheap"],
  ["Qwen/Qwen3-0.6B", "1.5 GB", "Apache 2.0", "reasons before it answers"],
]);

const FOLDER = "folder";

/** The files of the folder of a handle. @param {any} handle @returns {Promise<Model>} */
async function fromHandle(handle) {
  /** @type {{ path: string, file: File }[]} */
  const found = [];
  /** @param {any} directory @param {string} path */
  const walk = async (directory, path) => {
    for await (const entry of directory.values()) {
      if (entry.kind === "file") found.push({ path: `${path}/${entry.name}`, file: await entry.getFile() });
      else if (path.split("/").length < 3) await walk(entry, `${path}/${entry.name}`);
    }
  };
  await walk(handle, handle.name);
  return { ...folder(found), handle };
}

/** Keeps the handle of a folder whose model was loaded. @param {Model} model */
export const rememberFolder = ({ name, handle }) => handle && handles.set(FOLDER, { name, handle }).catch(() => {});

/**
 * The page's last model: `model` if it can be loaded without a request to another host or a question to the user (one that is
 * stored here, or a folder that the browser still lets the page read), else `folder`. `broken` is a download that is neither
 * complete nor running in another tab.
 * @param {() => Promise<typeof import("./js/selkie.js")>} api
 * @returns {Promise<{ model?: Model, folder?: { name: string, handle?: any }, broken?: { url: string, bytes: number } }>}
 */
export async function kept(api) {
  const last = recall("model", /** @type {any} */ (null));
  if (typeof last?.folder === "string") {
    const saved = await handles.get(FOLDER).catch(() => undefined), same = saved?.name === last.folder ? saved.handle : undefined;
    const allowed = same && (await same.queryPermission({ mode: "read" }).catch(() => "denied")) === "granted";
    if (allowed) return fromHandle(same).then((model) => ({ model }), () => ({ folder: { name: last.folder } }));
    return { folder: { name: last.folder, handle: same } };
  }
  const stored = (await api().then((a) => a.storage()).catch(() => null))?.models ?? [];
  const locks = (await navigator.locks?.query().catch(() => null))?.held ?? [];
  const broken = stored.find((m) => !m.done && !locks.some((lock) => lock.name === `selkie-model ${m.url}`) && m.url !== DEMO_URL);
  const model = typeof last === "string" && stored.some((m) => m.url === last && m.done) ? { source: { url: last }, name: modelName(last) } : undefined;
  return { model, broken };
}

/**
 * Offers the folder of the last visit again: the user must allow it, or choose it again.
 * @param {{ name: string, handle?: any }} folder
 * @param {{ say: (text: string, label: string, act: () => void) => void, use: (model: Model) => void, choose: () => void }} page
 */
export function askAgain({ name, handle }, { say, use, choose }) {
  if (!handle) return say(`The last model was ${name}, from a folder. The browser does not remember folders: choose it again to use it.`, "Choose…", choose);
  say(`The last model was ${name}, from a folder.`, `Open ${name}`, async () => {
    const allowed = (await handle.requestPermission({ mode: "read" }).catch(() => "denied")) === "granted";
    if (allowed) await fromHandle(handle).then(use, choose);
    else choose();
  });
}

/**
 * @param {object} page
 * @param {() => Promise<typeof import("./js/selkie.js")>} page.api
 * @param {() => { model: Model, info: import("./js/selkie.js").EngineInfo | null }} page.current
 * @param {(model: Model) => void} page.load
 * @returns {{ open: () => void, offer: (model: Promise<Model>) => void }}
 */
export function modelDialog({ api, current, load }) {
  const dialog = by("model-dialog"), found = by("model-found"), address = by("model-url"), go = by("url-go"), backend = by("backend");
  /** @type {AbortController | null} */
  let looking = null;

  /** The model that is being checked. @type {Promise<Model> | Model | null} */
  let shown = null;

  const use = (/** @type {Model} */ model) => {
    dialog.close();
    load("url" in model.source && model.source.url === DEMO_URL ? DEMO : model);
  };
  const card = (/** @type {any[]} */ ...children) => found.replaceChildren(put(h("div", { className: "card" }), ...children));

  /** @param {unknown} error */
  const complain = (error) => {
    const { text, advice } = sentence(error);
    card(h("p", { className: "problem" }, text), advice && h("p", {}, advice));
  };

  /** Shows the facts from the headers of a model's files, and offers to load it. @param {Promise<Model> | Model} promised */
  async function look(promised) {
    looking?.abort();
    const mine = (looking = new AbortController()), focused = document.activeElement;
    shown = promised;
    card(h("p", { className: "busy" }, "Reading the model's files…"));
    found.scrollIntoView({ block: "nearest" });
    try {
      const model = await promised;
      const selkie = await api();
      const info = await selkie.inspect(model.source, { backend: settings.backend, signal: mine.signal });
      const kept = await selkie.storage().catch(() => null);
      if (mine.signal.aborted) return;
      const url = "url" in model.source ? new URL(model.source.url) : null;
      const comes = !url || info.downloadBytes === 0 ? "" : `Loading downloads ${bytes(info.downloadBytes)} from ${url.host}.`;
      const free = kept && kept.quota !== null && kept.usage !== null ? kept.quota - kept.usage : null;
      const lacks = comes && free !== null && free < info.downloadBytes
        && `This browser has room to keep ${bytes(Math.max(free, 0))}: the model would be held in memory while it loads, and downloaded again next time.`;
      const fits = info.backend === "wgpu" && !info.problem
        ? `No problem expected on ${info.device}. Browsers do not tell how much GPU memory is free.` : `It fits this device: ${info.device}.`;
      const button = h("button", { type: "button", className: "primary", onclick: () => use(model) }, "Load this model");
      card(h("h3", {}, model.name), facts(info),
        h("p", { className: info.fits ? "" : "problem" }, info.fits ? fits : info.problem ?? "It does not fit this device."),
        info.fits && comes && h("p", { className: "hint" }, comes), info.fits && lacks && h("p", { className: "problem" }, lacks),
        info.fits && button);
      // If the user moved to another field in the meantime, the focus stays there.
      if (info.fits && [focused, document.body, dialog].includes(document.activeElement)) button.focus();
    } catch (error) {
      if (!mine.signal.aborted) complain(error);
    } finally {
      found.scrollIntoView({ block: "nearest" });
    }
  }

  /** @param {any} info */
  const facts = (info) => h("p", { className: "hint" },
    [info.family, `${parameters(info.parameters)} parameters`, bytes(info.weightBytes), `${count(info.contextTokens)} tokens of context`].join(" · "));

  async function fill() {
    const { model, info } = current();
    const demo = "url" in model.source && model.source.url === DEMO_URL;
    put(by("model-current"),
      h("h3", {}, model.name, " ", h("span", { className: "badge" }, info ? "in use" : "not loaded")),
      info && facts(info),
      info && h("p", { className: "hint" }, `${backendName(info.backend)}: ${info.device}`),
      model !== SERVER && hasModel && h("button", { type: "button", onclick: () => use(SERVER) }, "Back to the server's model"),
      !demo && h("button", { type: "button", onclick: () => use(DEMO) }, hasModel ? "The demo model, in this page" : "Back to the demo model"));
    backend.value = settings.backend;
    label();
    try {
      const kept = await (await api()).storage();
      by("stored").replaceChildren(...kept.models.map((m) => h("li", {},
        h("span", {}, modelName(m.url), h("span", { className: "hint" }, ` ${bytes(m.bytes)}${m.done ? "" : ", not complete"}`)),
        h("button", { type: "button", "aria-label": `${m.done ? "Use" : "Resume"} ${modelName(m.url)}`, onclick: () => use({ source: { url: m.url }, name: modelName(m.url) }) }, m.done ? "Use" : "Resume"),
        h("button", { type: "button", "aria-label": `Forget ${modelName(m.url)}`, onclick: () => forget(m.url) }, "Forget"))));
      by("storage-hint").textContent = kept.kind === "memory" ? `Models cannot be kept here: ${kept.problem}`
        : [kept.models.length ? "" : "Nothing yet.", kept.usage !== null && kept.quota !== null ? `${bytes(kept.usage)} used of ${bytes(kept.quota)}.` : ""].join(" ");
    } catch (error) {
      by("storage-hint").textContent = sentence(error).text;
    }
  }

  /** @param {string} url */
  async function forget(url) {
    try {
      await (await api()).forget(url);
      // Screen readers do not read what is outside an open dialog.
      card(h("p", {}, `${modelName(url)} is no longer kept.`));
    } catch (error) {
      complain(error);
    }
    await fill();
    by("model-title").scrollIntoView({ block: "nearest" });
  }

  // The button names the host before the page contacts it.
  const label = () => {
    try {
      go.textContent = `Ask ${modelUrl(address.value).host}`;
    } catch {
      go.textContent = "Check";
    }
  };
  address.addEventListener("input", label);
  by("url-form").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    try {
      const url = modelUrl(address.value).href;
      look({ source: { url }, name: modelName(url) });
    } catch (error) {
      complain(error);
    }
  });

  const input = by("folder");
  if (!("webkitdirectory" in input)) by("pick-folder").textContent = "Choose the files…";
  by("pick-folder").addEventListener("click", async () => {
    const pick = /** @type {any} */ (self).showDirectoryPicker;
    if (!pick) return input.click();
    // The user may cancel the dialog.
    const handle = await pick({ id: "model", mode: "read" }).catch(() => null);
    if (!handle) return;
    look(fromHandle(handle));
  });
  input.addEventListener("change", () => {
    const files = /** @type {File[]} */ ([...input.files]);
    input.value = "";
    if (files.length) look(folder(files.map((file) => ({ path: file.webkitRelativePath || file.name, file }))));
  });

  by("starters").replaceChildren(...STARTERS.map(([name, size, licence, what]) => {
    const { href, host } = modelUrl(name);
    return h("li", {},
      h("span", {}, h("b", {}, name.split("/")[1]), h("span", { className: "hint" }, ` ${size} · ${licence} · ${what}`)),
      h("button", { type: "button", "aria-label": `Ask ${host} for ${name}`, onclick: () => look({ source: { url: href }, name }) }, `Ask ${host}`));
  }));

  backend.addEventListener("change", () => {
    settings.backend = backend.value;
    save();
    if (shown) return look(shown);
    const { model } = current();
    card(h("p", {}, "This applies from the next load."),
      h("button", { type: "button", className: "primary", onclick: () => use(model) }, `Load ${model.name} again`));
  });
  dialog.addEventListener("close", () => {
    looking?.abort();
    shown = null;
    found.replaceChildren();
  });

  const open = () => {
    if (!dialog.open) dialog.showModal();
    fill();
  };
  return { open, offer(model) { open(); look(model); } };
}
