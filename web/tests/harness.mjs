// Shared by the browser tests: a real Chromium, the page from `selkie web`, and servers of models that misbehave.

import { spawn } from "node:child_process";
import { createReadStream, existsSync, mkdirSync, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { after } from "node:test";
import { chromium } from "playwright-core";

export { chromium };
export const CHROMIUM = process.env.SELKIE_CHROMIUM ?? "/usr/bin/chromium";

export const ROOT = join(dirname(fileURLToPath(import.meta.url)), "../..");
export const DEMO = join(ROOT, "models/demo");
export const DIST = process.env.SELKIE_DIST ?? join(ROOT, "web/dist");
export const SELKIE = process.env.SELKIE_BIN ?? join(ROOT, "target/release/selkie");

const cleanups = [];
export const atEnd = (cleanup) => cleanups.push(cleanup);
after(async () => {
  for (const cleanup of cleanups.reverse()) await cleanup();
});

// The page from the native binary: { url, stop() }.
export async function serve(dir = DIST, port = 0) {
  const child = spawn(SELKIE, ["web", "--port", String(port), "--dir", dir], { stdio: ["ignore", "pipe", "inherit"] });
  const stop = () => child.kill("SIGKILL");
  atEnd(stop);
  const url = await new Promise((resolve, reject) => {
    createInterface(child.stdout).once("line", resolve);
    child.once("exit", (code) => reject(new Error(`selkie web ended with ${code}`)));
  });
  return { url, port: Number(new URL(url).port), stop };
}

// `selkie serve` with the demo model: { url, stop() }. A server whose page is that of DIST: it looks for web/dist where it is started.
export async function modelServer(...options) {
  const args = ["serve", "--backend", "cpu", "--port", "0", ...options];
  const child = spawn(SELKIE, args, { cwd: dirname(dirname(DIST)), stdio: ["ignore", "pipe", "inherit"] });
  const stop = () => child.kill("SIGKILL");
  atEnd(stop);
  const url = await new Promise((resolve, reject) => {
    createInterface(child.stdout).once("line", resolve);
    child.once("exit", (code) => reject(new Error(`selkie serve ended with ${code}`)));
  });
  return { url, stop };
}

// Without `--enable-unsafe-webgpu` a headless Chromium has no adapter; with it, a software one.
const QUIET = ["background-networking", "component-update", "sync", "quic"].map((what) => `--disable-${what}`);
export const FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", ...QUIET];
const WEBGPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"];

// Browsers of different numbers are processes of their own, each with its own GPU process.
const browsers = new Map();
export async function browser({ webgpu = true, number = 0 } = {}) {
  const key = `${webgpu} ${number}`;
  if (!browsers.has(key)) {
    const args = [...FLAGS, ...(webgpu ? WEBGPU : [])];
    const ignoreDefaultArgs = ["--disable-gpu", "--enable-unsafe-swiftshader"];
    const started = chromium.launch({ executablePath: CHROMIUM, args, ignoreDefaultArgs });
    browsers.set(key, started);
    atEnd(async () => (await started).close());
  }
  return browsers.get(key);
}

// A new profile: no storage, no cache. `errors` collects what the console and uncaught exceptions say.
export async function profile({ webgpu = true, number = 0, ...options } = {}) {
  const context = await (await browser({ webgpu, number })).newContext(options);
  const errors = [];
  context.on("console", (message) => {
    if (message.type() === "error") errors.push(`${message.text()} (${message.location().url})`);
  });
  context.on("weberror", (error) => errors.push(String(error.error())));
  return { context, errors };
}

// An empty page of the origin `url`, where the JS API is `selkie`: page.evaluate(() => selkie.load(...)).
export async function blank(context, url) {
  const page = await context.newPage();
  const empty = { contentType: "text/html", body: "<!doctype html><title>test</title>" };
  await page.route("**/blank.html", (route) => route.fulfill(empty));
  await page.goto(new URL("blank.html", url).href);
  await page.evaluate(async () => {
    globalThis.selkie = await import("/js/selkie.js");
    // The error of a rejected promise, in a form that a test can read.
    globalThis.failure = (promise) => promise.then(() => null, ({ code, message }) => ({ code, message }));
  });
  return page;
}

// Serves the files of `dir` (default: the demo model) below `/model/` at http://localhost.
// `rules`, which may be changed at any time: cors, ranges and unsized are switches, etag a text, missing and hang lists of
// names; status, cut (bytes after which the connection ends) and bodies (other contents) go by name;
// head is the status of every answer to HEAD. `log` has a line for each request: "GET model.gguf bytes=0-".
export async function modelHost(rules = {}, dir = DEMO) {
  const log = [];
  const server = createServer((request, response) => {
    const name = new URL(request.url, "http://x").pathname.replace(/^\/model\//, "");
    log.push([request.method, name, request.headers.range].filter(Boolean).join(" "));
    const headers = rules.cors === false ? {} : { "access-control-allow-origin": "*", "access-control-expose-headers": "ETag, Content-Range" };
    const path = join(dir, name);
    const known = !rules.missing?.includes(name) && (rules.bodies?.[name] !== undefined || existsSync(path));
    const refused = request.method === "HEAD" ? rules.head : undefined;
    const status = rules.status?.[name] ?? refused ?? (known ? 200 : 404);
    if (status !== 200) return response.writeHead(status, headers).end(`status ${status}`);
    if (rules.hang?.includes(name)) return;
    const body = rules.bodies?.[name];
    const size = body === undefined ? statSync(path).size : Buffer.byteLength(body);
    if (rules.etag !== null) headers.etag = rules.etag ?? '"1"';
    const range = rules.ranges === false ? null : /^bytes=(\d+)-(\d*)$/.exec(request.headers.range ?? "");
    const start = range ? Number(range[1]) : 0;
    const end = Math.min(size, range?.[2] ? Number(range[2]) + 1 : size);
    if (!rules.unsized) headers["content-length"] = end - start;
    if (range) headers["content-range"] = `bytes ${start}-${end - 1}/${size}`;
    response.writeHead(range ? 206 : 200, headers);
    if (request.method === "HEAD") return response.end();
    const bytes = body === undefined ? null : Buffer.from(body).subarray(start, end);
    if (bytes) return response.end(bytes);
    const cut = rules.cut?.[name];
    const stream = createReadStream(path, { start, end: end - 1, highWaterMark: 1 << 16 });
    if (cut === undefined) return stream.pipe(response);
    // After `cut` bytes the connection breaks, or just ends if no length was announced.
    let sent = 0;
    stream.on("data", (chunk) => {
      if (sent >= cut) return;
      sent += chunk.length;
      // What waits in this process when the connection is destroyed is lost: only what was written counts as sent.
      const ended = () => sent >= cut && setTimeout(() => (rules.unsized ? response.end() : response.destroy()), 50);
      response.write(chunk.subarray(0, chunk.length - Math.max(0, sent - cut)), ended);
    });
  });
  await new Promise((resolve) => server.listen(0, "localhost", resolve));
  const stop = () => {
    server.closeAllConnections();
    return new Promise((resolve) => server.close(resolve));
  };
  atEnd(stop);
  return { url: `http://localhost:${server.address().port}/model/`, rules, log, stop };
}

export const demoBytes = (name) => readFileSync(join(DEMO, name));

const ARTIFACTS = join(ROOT, "web/artifacts");
mkdirSync(ARTIFACTS, { recursive: true });
export const picture = (page, name) => page.screenshot({ path: join(ARTIFACTS, `${name}.png`) });

// The page in a new profile. `requests` collects where it went, `errors` what went wrong. Most tests are about the page and
// take the CPU, which is faster than WebGPU in software.
export async function openPage(url, { path = "", wait = true, webgpu = false, ...options } = {}) {
  const { context, errors } = await profile({ webgpu, ...options });
  const requests = [];
  context.on("request", (request) => requests.push(request.url()));
  const page = await context.newPage();
  page.setDefaultTimeout(120_000);
  await page.goto(url + path);
  if (wait) await ready(page);
  return { context, page, errors, requests };
}

const engineState = (page, state) => page.waitForFunction((state) => document.documentElement.dataset.engine === state, state);
export const ready = (page) => engineState(page, "ready");
export const idle = (page) => page.waitForFunction(() => document.documentElement.dataset.answer !== "running");
export const answers = (page) => page.locator(".turn.assistant .body");

// Sends a message and waits for the whole answer.
export async function say(page, text) {
  const before = await answers(page).count();
  await page.fill("#message", text);
  await page.press("#message", "Enter");
  await answers(page).nth(before).waitFor();
  await idle(page);
  return answers(page).nth(before).innerText();
}
