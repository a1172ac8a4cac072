/**
 * The chats, in IndexedDB. Two tabs may show the same chat. If another tab has changed it, it is not overwritten: the later
 * writer's version becomes a separate chat. Without IndexedDB chats last as long as the page.
 */

/** @typedef {import("./chat.js").Entry} Entry */
/**
 * @typedef {object} Chat
 * @property {string} id
 * @property {number} rev counts writes; 0 was never written
 * @property {string} title
 * @property {boolean} [named] whether a person chose the title
 * @property {number} created in ms since 1970
 * @property {number} updated
 * @property {{ name: string, url?: string }} [model] that answered last
 * @property {string} [system] the system prompt that an imported state begins with, instead of the setting
 * @property {number} [left] oldest entries that the prompt leaves out
 * @property {Entry[]} entries
 */

const DATABASE = "selkie", CHATS = "chats", HANDLES = "handles";

/** Not randomUUID: a page from a plain http address has none. */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(9))].map((n) => n.toString(36).padStart(2, "0")).join("");

/** @returns {Chat} */
export const newChat = () => ({ id: newId(), rev: 0, title: "New chat", created: Date.now(), updated: Date.now(), entries: [] });

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const result = (request) => new Promise((ok, no) => {
  request.onsuccess = () => ok(request.result);
  request.onerror = () => no(request.error);
});

/** @returns {Promise<IDBDatabase>} */
function connect() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(CHATS, { keyPath: "id" });
    request.result.createObjectStore(HANDLES);
  };
  return result(request);
}

/** How long the browser may take to open the database. */
const PATIENCE_MS = 3000;
/** Null if the browser denies it or does not answer. @type {Promise<IDBDatabase | null>} */
const database = Promise.race([
  (async () => connect())().catch(() => null),
  new Promise((ok) => setTimeout(() => ok(null), PATIENCE_MS)),
]);

/** Chats that are not kept for the next visit. @type {Map<string, Chat>} */
const memory = new Map();

/** @template T @param {string} name @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => Promise<T>} act @returns {Promise<T>} */
async function within(name, mode, act) {
  const db = /** @type {IDBDatabase} */ (await database), transaction = db.transaction(name, mode, { durability: "relaxed" });
  const over = new Promise((ok, no) => {
    transaction.oncomplete = () => ok(null);
    transaction.onabort = transaction.onerror = () => no(transaction.error);
  });
  over.catch(() => {});
  const value = await act(transaction.objectStore(name));
  await over;
  return value;
}

const news = "BroadcastChannel" in self ? new BroadcastChannel("selkie-chats") : null;
const tell = (/** @type {string} */ id) => news?.postMessage(id);

export const chats = {
  /** Whether they are kept for the next visit. */
  kept: async () => (await database) !== null,

  /** All of them, the last changed first. @returns {Promise<Chat[]>} */
  async all() {
    const found = (await database) ? await within(CHATS, "readonly", (store) => result(store.getAll())) : [...memory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  },

  /** @param {string} id @returns {Promise<Chat | null>} */
  async get(id) {
    if (!(await database)) return structuredClone(memory.get(id)) ?? null;
    return (await within(CHATS, "readonly", (store) => result(store.get(id)))) ?? null;
  },

  /**
   * Writes a chat as it is at the time of the call; writes come in the order of the calls.
   * @param {Chat} chat gets its new `rev`; a new `id` and title if another tab has changed it
   * @returns {Promise<boolean>} whether it became a separate chat
   */
  save(chat) {
    const copy = structuredClone(chat);
    const write = writing.then(() => put(copy, chat));
    writing = write.catch(() => {});
    return write;
  },

  /** @param {string} id */
  async remove(id) {
    await writing;
    if (await database) await within(CHATS, "readwrite", (store) => result(store.delete(id)));
    memory.delete(id);
    tell(id);
  },

  /** Calls `hear` with the ids of chats that other tabs changed. @param {(id: string) => void} hear */
  changed(hear) {
    news?.addEventListener("message", (event) => hear(event.data));
  },
};

/** @type {Promise<unknown>} */
let writing = Promise.resolve();

/** @param {Chat} copy @param {Chat} chat */
async function put(copy, chat) {
  let own = false;
  /** @param {Chat | undefined} stored */
  const next = (stored) => {
    // If a tab deletes a chat while another continues it, the chat is saved again.
    own = stored !== undefined && stored.rev !== chat.rev;
    return { ...copy, id: own ? newId() : chat.id, title: own ? `${copy.title} (2)` : copy.title, rev: chat.rev + 1 };
  };
  const written = (await database)
    ? await within(CHATS, "readwrite", async (store) => {
      const one = next(await result(store.get(chat.id)));
      await result(store.put(one));
      return one;
    })
    : next(memory.get(chat.id));
  if (!(await database)) memory.set(written.id, written);
  Object.assign(chat, { rev: written.rev, ...(own && { id: written.id, title: written.title }) });
  tell(chat.id);
  return own;
}

/** Folders that the user chose, as the browser lets a page remember them. */
export const handles = {
  /** @param {string} key @returns {Promise<any>} */
  get: async (key) => ((await database) ? within(HANDLES, "readonly", (store) => result(store.get(key))) : undefined),
  /** @param {string} key @param {unknown} handle */
  set: async (key, handle) => ((await database) ? within(HANDLES, "readwrite", (store) => result(store.put(handle, key))) : undefined),
};
