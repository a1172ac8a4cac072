// Keeps the page itself, so that it opens without a network; models are kept elsewhere (js/shelf.js).
//
// The network comes first, so the page is as new as its server's. If the page does not come, or not in time, the kept one is
// used with its files. These belong together: `precache.js`, written by web/build, lists those of one build, and a new list
// makes a new copy of all of them. If just one file does not come, the kept one may be older than the rest.

importScripts("precache.js");

const PREFIX = "selkie-page ";
const CACHE = PREFIX + self.PRECACHE.version;
// How long the server may take to begin its answer where a kept one is at hand.
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

// Whether the page that was opened last is the kept one: then its files are too.
let openedKept = false;

async function answer(request, url) {
  const kept = await caches.match(url, { cacheName: CACHE }).catch(() => null);
  const opens = request.mode === "navigate";
  if (kept && openedKept && !opens) return kept;
  // A navigation's request has to stay as it is: the server may redirect it.
  const coming = opens ? fetch(request) : fetch(request, { cache: "no-cache" });
  if (!kept) return coming;
  const late = new Promise((resolve) => setTimeout(resolve, PATIENCE_MS));
  const response = await Promise.race([coming, late]).catch(() => null);
  const usable = response?.ok || response?.type === "opaqueredirect";
  if (opens) openedKept = !usable;
  return usable ? response : kept;
}
