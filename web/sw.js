// Stores the page's own files, so that it opens without a network; js/shelf.js stores models.
//
// The network is asked first, so the page is as new as the server's. If the page does not arrive in time, the stored page and
// its files are used. They belong together: `precache.js`, written by web/build, lists the files of one build, and a new list
// replaces all of them. If only a single file fails to arrive, its stored copy may be older than the other files.

importScripts("precache.js");

const PREFIX = "selkie-page ";
const CACHE = PREFIX + self.PRECACHE.version;
// How long to wait for the start of the server's answer if there is a stored one.
const PATIENCE_MS = 4000;
const files = new Set(["", ...self.PRECACHE.files].map((file) => new URL(file, self.registration.scope).href));

self.addEventListener("install", (event) => {
  const requests = [...files].map((url) => new Request(url, { cache: "no-cache" }));
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(requests)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = async () => {
    for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== CACHE) await caches.delete(name);
    await self.clients.claim();
  };
  event.waitUntil(old());
});

self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  url.hash = url.search = "";
  if (event.request.method !== "GET" || !files.has(url.href)) return;
  event.respondWith(answer(event.request, url.href));
});

// Whether the page opened last came from storage; then its files do too.
let openedKept = false;

async function answer(request, url) {
  const kept = await caches.match(url, { cacheName: CACHE }).catch(() => null);
  const opens = request.mode === "navigate";
  if (kept && openedKept && !opens) return kept;
  // A navigation's request must not be changed, because the server may redirect it.
  const coming = opens ? fetch(request) : fetch(request, { cache: "no-cache" });
  if (!kept) return coming;
  const late = new Promise((resolve) => setTimeout(resolve, PATIENCE_MS));
  const response = await Promise.race([coming, late]).catch(() => null);
  const usable = response?.ok || response?.type === "opaqueredirect";
  if (opens) openedKept = !usable;
  return usable ? response : kept;
}
