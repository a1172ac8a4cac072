/** The list of chats: open, rename, search, delete with undo, export and import. Next to the chat, or a sheet on narrow screens. */
import { by, count, h, icon, keep, plural, recall } from "./dom.js";
import { chats } from "./store.js";
import { download, fileName, fromFile, isBundle, toJson, toMarkdown } from "./transfer.js";
import { sentence } from "./words.js";

/** @typedef {import("./store.js").Chat} Chat */

/** @param {number} time */
function ago(time) {
  const days = (Date.now() - time) / 864e5, date = new Date(time);
  if (days < 1 && date.getDate() === new Date().getDate()) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return date.toLocaleDateString([], days < 300 ? { day: "numeric", month: "short" } : { year: "numeric", month: "short" });
}

/**
 * @param {object} page
 * @param {() => Chat} page.current the chat that is shown
 * @param {(chat: Chat) => void} page.open
 * @param {(id: string) => void} page.removing called before a chat is deleted
 * @param {(chat: Chat) => void} page.renamed
 * @param {() => Promise<[string, Blob, string] | null>} page.bundle the shown chat with its states, as a file
 * @param {(file: File) => Promise<{ one: Chat, state: import("./js/selkie.js").LoadedState }>} page.takeBundle
 * @param {() => void} page.leave moves the focus on when the sheet closes
 * @param {(text: string, label?: string, act?: () => void) => void} page.say
 */
export function chatList(page) {
  const aside = by("chats"), list = by("chat-list"), search = by("chat-search"), hint = by("chats-hint"), toggle = by("toggle-chats");
  const wide = matchMedia("(min-width: 62rem)");
  /** The title that is being changed. */
  let renaming = "";

  /** Whether all words of the search are in a chat. @param {Chat} chat @param {string[]} words */
  const has = ({ title, entries }, words) => {
    const text = [title, ...entries.map((e) => e.content)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  };

  async function refresh() {
    if (aside.hidden || renaming) return;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), all = await chats.all(), found = all.filter((chat) => has(chat, words));
    const focused = /** @type {any} */ (document.activeElement)?.dataset?.key;
    list.replaceChildren(...found.map(row));
    if (focused) list.querySelector(`[data-key="${focused}"]`)?.focus();
    hint.textContent = !(await chats.kept()) ? "This browser does not let the page keep anything: chats last until the page is closed."
      : !all.length ? "Chats are kept in this browser and nowhere else." : !found.length ? "No chat has these words." : "";
  }

  /** @param {Chat} chat */
  function row(chat) {
    const current = chat.id === page.current().id;
    const open = h("button", { type: "button", className: "open", "data-key": `open-${chat.id}`, "aria-current": current ? "true" : null, onclick: () => { page.open(chat); if (!wide.matches) show(false); } },
      h("span", { className: "title", dir: "auto" }, chat.title), h("span", { className: "hint" }, ago(chat.updated)));
    const node = h("li", {}, open,
      h("button", { type: "button", className: "quiet", title: "Rename", "aria-label": `Rename ${chat.title}`, "data-key": `rename-${chat.id}`, onclick: () => rename(chat, node) }, icon("i-edit")),
      h("button", { type: "button", className: "quiet", title: "Delete", "aria-label": `Delete ${chat.title}`, "data-key": `delete-${chat.id}`, onclick: () => remove(chat) }, icon("i-trash")));
    return node;
  }

  /** @param {Chat} chat @param {HTMLElement} node */
  function rename(chat, node) {
    renaming = chat.id;
    const input = h("input", { type: "text", value: chat.title, maxLength: 200, "aria-label": "Title of the chat" });
    const end = async (/** @type {boolean} */ take) => {
      if (renaming !== chat.id) return;
      renaming = "";
      const title = input.value.trim();
      // The current state: an answer may have arrived in the meantime.
      const now = chat.id === page.current().id ? page.current() : await chats.get(chat.id);
      if (take && title && now) {
        Object.assign(now, { title, named: true });
        await chats.save(now);
        page.renamed(now);
      }
      await refresh();
      list.querySelector(`[data-key="rename-${chat.id}"]`)?.focus();
    };
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" || event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation();
        end(event.key === "Enter");
      }
    });
    input.addEventListener("blur", () => end(true));
    node.replaceChildren(input);
    input.focus();
    input.select();
  }

  /** @param {Chat} chat */
  async function remove(chat) {
    const before = (await chats.get(chat.id)) ?? chat;
    page.removing(chat.id);
    await chats.remove(chat.id);
    await refresh();
    search.focus();
    page.say(`Deleted “${before.title}”.`, "Undo", async () => {
      const again = { ...before, rev: 0 };
      await chats.save(again);
      page.open(again);
      refresh();
    });
  }

  /** @param {Iterable<File>} files */
  async function take(files) {
    let states = "";
    const read = async (/** @type {File} */ file) => {
      if (!isBundle(file)) return fromFile(await file.text());
      page.say(`Reading ${file.name}…`);
      const { one, state } = await page.takeBundle(file);
      states = ` ${count(state.tokens)} of ${plural(state.ofTokens, "token")} need not be computed${state.converted ? ": their values were computed elsewhere and are converted" : ""}.${one.system ? " It keeps its own system prompt." : ""}`;
      return [one];
    };
    try {
      const found = (await Promise.all([...files].map(read))).flat();
      for (const chat of found) await chats.save(chat);
      if (found.length) page.open(found[0]);
      page.say(found.length ? `Imported ${plural(found.length, "chat")}.${states}` : "There is no chat in this file.");
    } catch (error) {
      page.say(sentence(error).text);
    }
    refresh();
  }

  const menu = by("export-menu");
  /** @param {string} id @param {() => Promise<[string, string | Blob, string] | null>} make */
  const exports = (id, make) => by(id).addEventListener("click", async () => {
    menu.open = false;
    try {
      const made = await make();
      if (made) download(...made);
      else page.say("There is nothing to export yet.");
    } catch (error) {
      page.say(sentence(error).text);
    }
  });
  const one = () => (page.current().entries.length ? page.current() : null);
  exports("export-md", async () => { const chat = one(); return chat && [fileName(chat.title, "md"), toMarkdown(chat), "text/markdown"]; });
  exports("export-json", async () => { const chat = one(); return chat && [fileName(chat.title, "json"), toJson([chat]), "application/json"]; });
  exports("export-bundle", page.bundle);
  exports("export-all", async () => { const all = await chats.all(); return all.length ? ["selkie-chats.json", toJson(all), "application/json"] : null; });
  by("import-chats").addEventListener("click", () => by("import-file").click());
  by("import-file").addEventListener("change", async (/** @type {any} */ event) => {
    await take(event.target.files);
    event.target.value = "";
  });

  /** @param {boolean} open */
  function show(open) {
    aside.hidden = !open;
    toggle.setAttribute("aria-expanded", String(open));
    refresh();
  }
  /** @param {boolean} open */
  function choose(open) {
    show(open);
    if (wide.matches) keep("chats-open", open);
    if (open) aside.focus({ preventScroll: true });
    else if (wide.matches) toggle.focus();
    else page.leave();
  }
  const fit = () => show(wide.matches && recall("chats-open", false));
  toggle.addEventListener("click", () => choose(aside.hidden));
  by("close-chats").addEventListener("click", () => choose(false));
  aside.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape") return;
    if (menu.open) menu.open = false;
    else choose(false);
  });
  // A touch outside a sheet closes it.
  document.addEventListener("pointerdown", ({ target }) => {
    if (!wide.matches && !aside.hidden && target instanceof Node && !aside.contains(target) && !toggle.contains(target)) show(false);
  });
  search.addEventListener("input", refresh);
  wide.addEventListener("change", fit);
  fit();
  return { refresh, take };
}
