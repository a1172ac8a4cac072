// The package for npm in empty projects: built by Vite and esbuild, from Vite's development server, and as it is from another origin.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { cpSync, createReadStream, existsSync, mkdirSync, mkdtempSync, rmSync, statSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { extname, join, normalize } from "node:path";
import { test } from "node:test";
import * as esbuild from "esbuild";
import * as vite from "vite";
import { ROOT, atEnd, modelHost, profile } from "./harness.mjs";

const home = mkdtempSync(join(tmpdir(), "selkie-npm-"));
atEnd(() => rmSync(home, { recursive: true, force: true }));
const tarball = join(ROOT, "web", execFileSync(join(ROOT, "web/pack"), { encoding: "utf8" }).trim());
const host = await modelHost();

const APP = `
import { load } from "selkie-web";
document.title = "started";
const engine = await load({ model: { url: ${JSON.stringify(host.url)} }, backend: "cpu" });
const messages = [{ role: "user", content: "What is 17 + 25?" }];
const whole = await engine.chat.completions.create({ messages });
let text = "";
for await (const chunk of await engine.chat.completions.create({ messages, stream: true, max_tokens: 40 })) text += chunk.choices[0].delta.content ?? "";
document.title = whole.choices[0].message.content + "|" + text;
`;
const HTML = '<!doctype html><meta charset="utf-8"><title>empty</title><script type="module" src="./app.js"></script>';

// A new project with the package in node_modules, as `npm install` leaves it.
function project(name, app = APP) {
  const dir = join(home, name), at = join(dir, "node_modules/selkie-web");
  mkdirSync(at, { recursive: true });
  execFileSync("tar", ["xzf", tarball, "--strip-components=1", "-C", at]);
  writeFileSync(join(dir, "index.html"), HTML);
  writeFileSync(join(dir, "app.js"), app);
  return dir;
}

const TYPES = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm" };

// Any static host.
async function hostOf(dir, headers = {}) {
  const server = createServer((request, response) => {
    const path = normalize(decodeURIComponent(new URL(request.url, "http://x").pathname)), file = join(dir, path.endsWith("/") ? `${path}index.html` : path);
    if (!existsSync(file) || statSync(file).isDirectory()) return response.writeHead(404, headers).end();
    response.writeHead(200, { "content-type": TYPES[extname(file)] ?? "application/octet-stream", ...headers });
    createReadStream(file).pipe(response);
  });
  await new Promise((resolve) => server.listen(0, "localhost", resolve));
  atEnd(() => server.closeAllConnections() ?? server.close());
  return `http://localhost:${server.address().port}/`;
}

async function answersAt(url) {
  const { context, errors } = await profile({ webgpu: false });
  const page = await context.newPage();
  const failures = [];
  page.on("pageerror", (error) => failures.push(String(error)));
  await page.goto(url);
  const done = page.waitForFunction(() => document.title.includes("|"), undefined, { timeout: 60_000 });
  const title = await done.then(() => page.title(), () => `${failures} ${errors} ${host.log.slice(-3)}`);
  assert.equal(title, "17 + 25 = 42.|17 + 25 = 42.");
  await context.close();
}

test("the package has what it needs and nothing else", () => {
  const files = execFileSync("tar", ["tzf", tarball], { encoding: "utf8" }).trim().split("\n").sort();
  const scripts = ["device", "errors", "openai", "options", "selkie", "shelf", "source", "states", "store", "worker"].map((name) => `package/js/${name}.js`);
  const rest = ["LICENSE-APACHE", "LICENSE-MIT", "README.md", "js/selkie.d.ts", "package.json", "selkie_web.js", "selkie_web_bg.wasm"];
  assert.deepEqual(files, [...scripts, ...rest.map((name) => `package/${name}`)].sort());
});

test("a plain module script", async () => {
  const dir = project("plain", APP.replace('"selkie-web"', '"./node_modules/selkie-web/js/selkie.js"'));
  await answersAt(await hostOf(dir));
});

test("a module script from another origin", async () => {
  const packages = await hostOf(join(project("elsewhere"), "node_modules"), { "access-control-allow-origin": "*" });
  const dir = join(home, "bare");
  mkdirSync(dir);
  writeFileSync(join(dir, "index.html"), HTML);
  writeFileSync(join(dir, "app.js"), APP.replace('"selkie-web"', JSON.stringify(`${packages}selkie-web/js/selkie.js`)));
  await answersAt(await hostOf(dir));
});

test("esbuild", async () => {
  const dir = project("esbuild", APP.replace("{ load }", "{ load, setAssets }").replace("document.title", 'setAssets("selkie-web");\n$&'));
  const outdir = join(dir, "public");
  await esbuild.build({ absWorkingDir: dir, entryPoints: ["app.js"], bundle: true, format: "esm", outdir, logLevel: "silent" });
  cpSync(join(dir, "index.html"), join(outdir, "index.html"));
  cpSync(join(dir, "node_modules/selkie-web"), join(outdir, "selkie-web"), { recursive: true });
  await answersAt(await hostOf(outdir));
});

const VITE = { configFile: false, logLevel: "silent", optimizeDeps: { exclude: ["selkie-web"] }, worker: { format: "es" } };

test("Vite: the build", async () => {
  const root = project("vite");
  await vite.build({ ...VITE, root });
  await answersAt(await hostOf(join(root, "dist")));
});

test("Vite: the development server", async () => {
  const server = await vite.createServer({ ...VITE, root: project("vite-dev"), server: { port: 0, host: "localhost" } });
  await server.listen();
  atEnd(() => server.close());
  await answersAt(server.resolvedUrls.local[0]);
});
