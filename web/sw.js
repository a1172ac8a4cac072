// Keeps the page itself, so that it opens without a network; models are kept elsewhere (js/shelf.js).
//
// The network comes first, so the page is never older than what the server has, and its files always belong together.
// `precache.js`, written by web/build, lists the files of one build: a new list makes a new copy of all of them.

importScripts("precache.js");

const PREFIX = "selkie-page ";
const CACHE = PREFIX + self.PRECACHE.version;
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
  event.respondWith(
    fetch(event.request).catch(async (error) => {
      const kept = await (await caches.open(CACHE)).match(url.href);
      if (kept) return kept;
      throw error;
    }),
  );
});
