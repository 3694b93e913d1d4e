// Keeps the Lab for visits without a network: the page and its first model at once, other files when they are used. Files
// are stored under their checksum, so that a new version of the site replaces what has changed and keeps the rest. A new
// version is shown once all pages of the old one are closed.

const FILES = {}; // path → checksum, filled in when the site is written
const FIRST = []; // paths that are needed at once
const STORE = `capsule-lab ${registration.scope}`;

const keyOf = (path) => `${registration.scope}${path}?${FILES[path]}`;

/** The path of one of our files; null for anything else. */
function pathOf({ method, url }) {
  const { origin, pathname } = new URL(url);
  if (method !== "GET" || !`${origin}${pathname}`.startsWith(registration.scope)) return null;
  const path = `${origin}${pathname}`.slice(registration.scope.length) || "index.html";
  return path in FILES ? path : null;
}

/** From the store, or from the network into the store. */
async function serve(path) {
  const store = await caches.open(STORE);
  const kept = await store.match(keyOf(path));
  if (kept) return kept;
  const address = path === "index.html" ? registration.scope : registration.scope + path; // some hosts redirect index.html
  const response = await fetch(address, { cache: "no-cache" });
  if (response.ok) await store.put(keyOf(path), response.clone());
  return response;
}

async function discardOld() {
  const store = await caches.open(STORE), current = new Set(Object.keys(FILES).map(keyOf));
  for (const { url } of await store.keys()) if (!current.has(url)) await store.delete(url);
  await clients.claim();
}

addEventListener("install", (event) => event.waitUntil(Promise.all(FIRST.map(serve))));
addEventListener("activate", (event) => event.waitUntil(discardOld()));
addEventListener("message", (event) => {
  event.waitUntil(Promise.all(event.data.keep.filter((path) => path in FILES).map((path) => serve(path).catch(() => {}))));
});
addEventListener("fetch", (event) => {
  const path = pathOf(event.request);
  if (path !== null) event.respondWith(serve(path));
});
