/**
 * selkie in a web page: a language model in a worker, on WebGPU or on the CPU.
 *
 * ```js
 * import { load } from "./js/selkie.js";
 *
 * const engine = await load({ model: { url: "model/" }, onProgress: (p) => console.log(p.stage, p.loaded, "of", p.total) });
 * const answer = engine.generate({ messages: [{ role: "user", content: "What is 17 + 25?" }] });
 * for await (const update of answer) if (update.type === "text") document.body.append(update.text);
 * console.log((await answer.done).usage); // { promptTokens, completionTokens, matched, reused, computed, reason }
 * ```
 *
 * Serve the files of this folder and the wasm module in the folder above (`../selkie_web.js`, `../selkie_web_bg.wasm`). No special
 * headers are needed on the page's own origin; another origin must allow the page's by CORS, and the page `blob:` workers. Sizes are in bytes and times in milliseconds unless a name says otherwise.
 */

/**
 * Where a model is: the URL of a directory as published on Hugging Face (`config.json`, `tokenizer.json`, and safetensors or `model.gguf`), or
 * the files of such a directory, picked by the user. Files are identified by their names without a path.
 *
 * A URL may be relative to the page. It must be on the page's own server, https, or http://localhost. The URL of a file in the
 * directory (`.json`, `.safetensors` or `model.gguf`) or of the model's page at Hugging Face (also hf.co) means the directory.
 */
export type ModelSource = { url: string } | { files: File[] };

/**
 * The URL of a model's directory from typed text: as in {@link ModelSource}, or `owner/model` at Hugging Face; `https://` may be
 * left out. No host is contacted. Throws a {@link SelkieError}: `not_found` if the text is not an address, `cors` if a page must
 * not contact it.
 */
export function modelUrl(text: string): URL;

/**
 * Names the folder that serves this package (`js/` and the wasm module), relative to the page, for bundlers that do not copy workers
 * and modules along with the code that starts them. Call it before anything else.
 */
export function setAssets(url: string): void;

/** `auto`: WebGPU where the browser has it, else the CPU. The other two never fall back. */
export type Backend = "auto" | "wgpu" | "cpu";

/**
 * `download`: bytes of all files from the network; `file` is the current one; not reported if the model is in storage.
 * `weights`: bytes copied to the device. `pipelines`: shaders compiled (a count, not bytes). `total` is 0 while it is unknown: in
 * a download until the sizes of all files are known, and always if a server reports no size, or one that is too small.
 */
export interface Progress {
  stage: "download" | "weights" | "pipelines";
  file?: string;
  loaded: number;
  total: number;
}

/** Options that do not exist are refused as `bad_request`, here and in every other call; the message has the nearest name. */
export interface LoadOptions {
  model: ModelSource;
  /** Default `auto`. */
  backend?: Backend;
  /** Keep and reuse prefixes; default true. */
  prefixCache?: boolean;
  /** Memory for states and KV pages, in MiB; default: a budget that suits a page. */
  memoryMiB?: number;
  /**
   * Storage of the browser for states and pages that memory has no room for, in MiB, all models together: later prompts, also of a
   * later visit, load them where that is faster than computing. At most a quarter of what the browser still grants. Default 0: nothing
   * is kept. Only models that the browser stores have it, and one tab of an origin at a time: {@link EngineInfo.diskCacheProblem}.
   * Conversations can be read from it. Values that were not used for 7 days are deleted.
   */
  diskCacheMiB?: number;
  /** Longest sequence in tokens; default: the model's own limit, but at most 8192. */
  contextTokens?: number;
  /** Sequences that run at a time; default 2. */
  maxBatch?: number;
  /**
   * Guess the tokens that come next and verify several in one step; answers stay the same. `ngram` guesses with the text so far, `mtp`
   * with the model's own head for that, `auto` (the default) with both where it should pay.
   */
  speculate?: "auto" | "off" | "ngram" | "mtp";
  /** Most guesses in a step of a sequence, 1 to 7 (the default). */
  drafts?: number;
  onProgress?(progress: Progress): void;
  /** Aborting ends the load with a {@link SelkieError} `cancelled`; the next load resumes the download. */
  signal?: AbortSignal;
}

/**
 * - `not_found`: the URL is malformed, or has no config.json.
 * - `network`: no answer, or a refusal by CORS (a page cannot tell the two apart and the message says so); a connection that
 *   broke; an answer with an error (the message has its HTTP status).
 * - `cors`: this page must not request the URL: it is neither on the page's own server nor https nor http://localhost, or the
 *   Content-Security-Policy forbids it.
 * - `missing_file`: there are no weights, or a file that other files of the model name is missing.
 * - `too_large`: the model exceeds the device's limits; the message has both numbers.
 * - `unsupported`: a family, dtype or feature that selkie does not support, or WebGPU was requested and is not available.
 * - `bad_model`: a file is damaged or contradicts another; the message names it.
 * - `device_lost`: the GPU was lost. The engine can no longer be used; `load` again, perhaps with `backend: "cpu"`.
 * - `out_of_memory`: an allocation on the device failed.
 * - `storage`: picked files can no longer be read (moved, changed), or another tab is loading this model.
 * - `cancelled`: the caller aborted, or closed the engine.
 * - `bad_request`: the request cannot be served (an unknown option, an empty prompt, invalid sampling values, longer than the
 *   context), or not while others run.
 * - `busy`: a step is running. The worker serialises calls, so pages should not see it.
 * - `internal`: a fault of selkie.
 */
export type ErrorCode =
  | "not_found" | "network" | "cors" | "missing_file" | "too_large" | "unsupported" | "bad_model" | "device_lost"
  | "out_of_memory" | "storage" | "cancelled" | "bad_request" | "busy" | "internal";

/** Every rejection of this module. `message` is a sentence for the user. */
export class SelkieError extends Error {
  readonly code: ErrorCode;
}

/** Facts from the headers of a model's files. */
export interface ModelInfo {
  /** Last part of the URL, or the folder's name. */
  name: string;
  /** `model_type` of config.json. */
  family: string;
  parameters: number;
  /** Tensor bytes in the files. */
  weightBytes: number;
  /** The model's own limit. */
  contextTokens: number;
  /** Recurrent state of one sequence; 0 without recurrent layers. */
  bytesPerSlot: number;
  /** Keys and values of 64 tokens; 0 without attention. */
  bytesPerPage: number;
  /** The backend that would run it. */
  backend: "wgpu" | "cpu";
  device: string;
  /** Whether it fits that device. */
  fits: boolean;
  /** If not: why, with numbers. */
  problem: string | null;
  /**
   * Bytes that `load` would download, as far as the server reports sizes; 0 if the model is in storage or from picked files.
   * The part that an unfinished download already has is included.
   */
  downloadBytes: number;
}

export interface InspectOptions {
  backend?: Backend;
  signal?: AbortSignal;
}

/**
 * Reads headers only, by range requests if the server supports them, and reports before a download whether the model fits, for
 * the defaults of {@link LoadOptions}. The small JSON files are read completely; nothing is stored.
 *
 * Rejects like `load`, but not with `too_large`: then `fits` is false.
 */
export function inspect(model: ModelSource, options?: InspectOptions): Promise<ModelInfo>;

/**
 * Downloads the model if it is not in storage, and loads it in a new worker. A model from a URL is stored for the next visit, and
 * the browser is asked not to delete it when space is short (some browsers ask the user). If the page's own server has newer
 * weights than those in storage, they are downloaded.
 */
export function load(options: LoadOptions): Promise<Engine>;

export interface EngineInfo {
  /** See {@link ModelInfo.name}. */
  name: string;
  family: string;
  /** One letter per layer: M Mamba-2, G Gated DeltaNet, * attention, - MLP, E mixture of experts. */
  layerMap: string;
  parameters: number;
  weightBytes: number;
  /** Longest sequence of this engine, prompt and answer together. */
  contextTokens: number;
  backend: "wgpu" | "cpu";
  /** Name of the GPU or of the software adapter; of the processor otherwise. */
  device: string;
  /** With `backend: "auto"` on the CPU: why not WebGPU, as a sentence. Else null. */
  fallback: string | null;
  /** Whether the adapter is software: WebGPU, but no GPU. */
  software: boolean;
  /** Number of recurrent states and of KV pages of 64 tokens that fit into memory, and the bytes of each. */
  slots: number;
  pages: number;
  bytesPerSlot: number;
  bytesPerPage: number;
  /** Bytes of both pools. */
  memoryBytes: number;
  /** Whether `messages` can be given. */
  chat: boolean;
  /** The model's default sampling values; a request overrides single values. */
  defaults?: Required<Omit<Sampling, "seed">>;
  /** The source of the bytes; `memory`: downloaded, but not stored by the browser (private window, storage full). */
  from: "network" | "storage" | "files" | "memory";
  /** If `from` is `memory`: why, as a sentence. Else null. */
  storageProblem: string | null;
  /** Whether states and pages are kept in the browser's storage. */
  diskCache: boolean;
  /** If `diskCacheMiB` was given and they are not: why, as a sentence. Else null. */
  diskCacheProblem: string | null;
  /** From the call of `load` to its end. */
  loadMs: number;
}

export interface Sampling {
  /** 0 always takes the likeliest token. */
  temperature?: number;
  /** Sample from the k likeliest tokens only; 0: from all. */
  topK?: number;
  /** Sample from the likeliest tokens whose probabilities add up to this. */
  topP?: number;
  /** Sample only tokens at least this times as likely as the likeliest. */
  minP?: number;
  /** Divide the logits of tokens that already occurred; 1: off. */
  repetitionPenalty?: number;
  /** A whole number, at most 2^53 - 1. The same seed gives the same text; default: a new one every time. */
  seed?: number;
}

export interface Message {
  role: "system" | "user" | "assistant" | string;
  content: string;
}

/** `messages` for the model's chat template, or a `prompt` that is continued as text. */
export interface GenerateRequest extends Sampling {
  messages?: Message[];
  prompt?: string;
  /** Default: 1024, or the rest of the context if that is less. */
  maxTokens?: number;
  /** Texts before which the answer ends. */
  stop?: string[];
  /** Prefixes are shared within a namespace only; default "". */
  namespace?: string;
  /** The `origin` of a {@link LoadedState}: continue from its converted values. Default "": from exact ones only. */
  origin?: string;
  /**
   * What happens to `messages` that are, with their answer, longer than the context: an error of the code `bad_request` (the
   * default), or the oldest turns are left out until prompt and answer fit and half of the context is free. System prompt and last
   * turn are always kept; if these alone are too long, it is an error.
   */
  whenFull?: "error" | "drop-oldest";
}

/** Why reuse ended: the first that applies. */
export type Reason = "off" | "prompt_logprobs" | "host" | "disk" | "evicted" | "policy" | "no_state" | "full" | "first_sight";

export interface Usage {
  promptTokens: number;
  /** An end-of-sequence token included. */
  completionTokens: number;
  /** Prompt tokens found in the prefix tree. */
  matched: number;
  /** Prompt tokens that were not computed: a multiple of 64. */
  reused: number;
  /** The reused tokens that were loaded from the browser's storage. */
  diskTokens: number;
  /** Prompt tokens that were computed. */
  computed: number;
  /** null if the request was cancelled before it ran. */
  reason: Reason | null;
  /** Whether the reused tokens are those of a bundle whose values were computed elsewhere and converted. */
  converted: boolean;
}

/** What {@link Engine.saveState} saves: a conversation up to the end of its last message, or a text. */
export interface SaveStateRequest {
  messages?: Message[];
  prompt?: string;
  /** Default "". */
  namespace?: string;
  /** See {@link GenerateRequest.origin}. What is saved from converted values says so, and is exact nowhere. */
  origin?: string;
  /** Most states, the deepest ones; default 8. */
  states?: number;
}

export interface SavedState {
  /** The bundle, which `selkie chat --load` and {@link Engine.loadState} read. */
  blob: Blob;
  /** Tokens from which a reader need not compute, a multiple of 64. */
  tokens: number;
  states: number;
  bytes: number;
}

export interface LoadStateOptions {
  /** Whose requests may use it; default "". */
  namespace?: string;
  /** Refuse values that another device or version computed, instead of converting them. */
  exactOnly?: boolean;
}

export interface LoadedState {
  /** Tokens that requests need not compute now, and tokens of the text. */
  tokens: number;
  ofTokens: number;
  /** States and pages that were written; what the cache had already is not counted. */
  states: number;
  pages: number;
  /** Whether the values come from another device or version. Then only requests with this `origin` use them; else it is "". */
  converted: boolean;
  origin: string;
  /** Where the values were computed. */
  numerics: string;
  /** The conversation, null if the bundle has none. Messages may have tool calls and reasoning. */
  messages: (Message & Record<string, unknown>)[] | null;
}

export interface Completion {
  type: "done";
  /** All of the answer. */
  text: string;
  finish: "stop" | "length" | "cancelled";
  /** The number of messages that were left out by `whenFull`: the oldest ones but for the system prompt. */
  leftOutMessages: number;
  usage: Usage;
  /** From submission to the first token; null if none came. */
  ttftMs: number | null;
  /** Of the answer after its first token; null for fewer than two tokens. */
  tokensPerSecond: number | null;
}

export type Update = { type: "text"; text: string } | Completion;

/**
 * A running answer. It runs whether it is read or not; text that arrived in the meantime is delivered in one piece. Iterate
 * once. Leaving the loop early cancels the answer.
 */
export interface Generation extends AsyncIterable<Update> {
  /** Ends the answer after the current step; the last update is a {@link Completion} with `finish: "cancelled"`. */
  cancel(): void;
  /** The last update. Rejects with the error that the loop throws. */
  readonly done: Promise<Completion>;
}

/** A page of the prefix tree: 64 tokens after its parent's. */
export interface TreeNode {
  /** Chained hash over all tokens from the start of the prompt; equal prompts have equal ids. */
  id: string;
  /** null for the first page of a prompt. */
  parent: string | null;
  /** Tokens from the start to the end of this page: 64, 128, ... */
  tokens: number;
  /** Whether a prompt can continue from here without recomputing the recurrent state. */
  hasState: boolean;
  /** Whether a running sequence holds its page or state. */
  inUse: boolean;
  /** Logical time of the last use, for ordering. */
  lastUse: number;
}

export interface Stats {
  backend: "wgpu" | "cpu";
  device: string;
  /** Recurrent states: capacity, in use, and of these held by the tree. Zeros without recurrent layers. */
  slots: { total: number; used: number; cached: number };
  /** The same for KV pages. Zeros without attention. */
  pages: { total: number; used: number; cached: number };
  /** States and pages of this model in the browser's storage, and the bytes that they take. */
  disk: { values: number; bytes: number };
  /** The prefix tree, parents before children; at most 200 nodes. */
  tree: TreeNode[];
  /** Number of nodes without that limit. */
  treeNodes: number;
  /** Totals since the load; prompt tokens are reused or computed. */
  requests: number;
  reusedTokens: number;
  computedTokens: number;
  generatedTokens: number;
  /** Requests by reason. */
  reasons: Record<Reason, number>;
  /** Size of the wasm module's memory; it never shrinks. */
  wasmBytes: number;
}

/** A request in OpenAI's form. Options that do not exist are refused, with the nearest name. */
export interface ChatCompletionRequest {
  messages: { role: string; content: string | { type: "text"; text: string }[] | null }[];
  /** Repeated in the answer; an engine has one model. */
  model?: string;
  stream?: boolean;
  stream_options?: { include_usage?: boolean } | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  stop?: string | string[] | null;
  temperature?: number | null;
  top_p?: number | null;
  top_k?: number | null;
  min_p?: number | null;
  repetition_penalty?: number | null;
  seed?: number | null;
  namespace?: string;
  /** 1 only. */
  n?: 1 | null;
  /** Accepted and not used. */
  user?: string;
}

export interface ChatCompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  /** Seconds since 1970. */
  created: number;
  model: string;
  choices: { index: number; message: { role: "assistant"; content: string }; logprobs: null; finish_reason: "stop" | "length" }[];
  usage: ChatCompletionUsage;
  /** What the prefix cache did. */
  selkie: Usage;
}

export interface ChatCompletionChunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  /** Empty in the last chunk with `include_usage`, which has `usage`. */
  choices: { index: number; delta: { role?: "assistant"; content?: string }; logprobs: null; finish_reason: "stop" | "length" | null }[];
  usage?: ChatCompletionUsage;
  selkie?: Usage;
}

/** Leaving the loop, or aborting, cancels the answer; an aborted one throws `cancelled`. */
export interface ChatCompletionStream extends AsyncIterable<ChatCompletionChunk> {
  readonly controller: AbortController;
}

export interface ChatCompletions {
  create(request: ChatCompletionRequest & { stream: true }, options?: { signal?: AbortSignal }): Promise<ChatCompletionStream>;
  create(request: ChatCompletionRequest & { stream?: false }, options?: { signal?: AbortSignal }): Promise<ChatCompletion>;
}

export interface Engine {
  readonly info: EngineInfo;
  /** For code written for OpenAI's client. */
  readonly chat: { readonly completions: ChatCompletions };
  /** Queues a request; its errors are thrown by the iteration and by `done`. */
  generate(request: GenerateRequest): Generation;
  /**
   * The states after a prompt as a bundle; what the cache lacks of it is computed first. The first call reads all weights for
   * their digest. Rejects with `bad_request` for a prompt of fewer than 64 tokens, or while the cache is off.
   */
  saveState(request: SaveStateRequest): Promise<SavedState>;
  /**
   * Puts a bundle into the prefix cache, so that requests continue from its states. It is read in pieces, and nothing of it is used
   * before all of it was checked: rejects with `bad_model`, naming what is wrong, if it is damaged or of another model, and with
   * `bad_request` if there is no room for it or `exactOnly` excludes it. Use bundles of people you trust only.
   */
  loadState(bundle: Blob | BufferSource, options?: LoadStateOptions): Promise<LoadedState>;
  /** Cancels all requests. */
  cancel(): void;
  stats(): Promise<Stats>;
  /** Empties the prefix cache, in storage too; running requests keep their states and pages. */
  clearCache(): Promise<void>;
  /**
   * Deletes the states and pages of all models from storage, and empties the cache. With `stop`, this engine keeps none from then on.
   * Rejects (`storage`) if another tab has them.
   */
  forgetStates(options?: { stop?: boolean }): Promise<void>;
  /** Turns reuse on or off for later requests. Rejects (`bad_request`) while a request is queued or running. */
  setPrefixCache(on: boolean): Promise<void>;
  /** Ends the worker and frees the device; unfinished requests end with a {@link SelkieError} `cancelled`. */
  close(): void;
  /**
   * Resolves with the reason when the engine fails as a whole (`device_lost`, `out_of_memory`, `internal`); else never. An engine
   * also ends with `internal` if a chat template takes all memory, all of the stack or more than a minute. A page cannot run a
   * template in a separate process, so the worker ends. {@link load} starts another.
   */
  readonly failed: Promise<SelkieError>;
}

export interface Storage {
  /**
   * Models by the URL that {@link forget} takes. `done` is false for a download that is running or was interrupted: `load`
   * resumes it, and `bytes` is the recorded part, somewhat less than the received one.
   */
  models: { url: string; bytes: number; done: boolean }[];
  /** Bytes that this origin uses and may use; null if the browser does not report them. */
  usage: number | null;
  quota: number | null;
  /** Where models are stored; `memory`: not at all, and `problem` says why. */
  kind: "opfs" | "cache" | "memory";
  problem: string | null;
}

/** Lists the models stored in the browser. */
export function storage(): Promise<Storage>;

/**
 * Deletes a model from storage, complete or not; does nothing if it is not there. Rejects (`storage`) while a tab downloads or
 * reads it.
 */
export function forget(url: string): Promise<void>;
