// Errors as the page sees them: a code for programs and a sentence for people.

export class SelkieError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = "SelkieError";
    this.code = code;
  }
}

// What was thrown, as a SelkieError; `code` is that of errors that have none of their own.
export function asSelkieError(thrown, code = "internal") {
  if (thrown instanceof SelkieError) return thrown;
  if (thrown?.name === "AbortError") return new SelkieError("cancelled", "The load was cancelled.");
  if (typeof thrown?.code === "string") return new SelkieError(thrown.code, thrown.message, { cause: thrown });
  const message = thrown?.message ?? String(thrown);
  return new SelkieError(code, code === "internal" ? `selkie failed: ${message}` : message, { cause: thrown });
}

// Errors lose their class and code on the way between worker and page.
export const packError = (error) => ({ code: error.code, message: error.message });
export const unpackError = ({ code, message }) => new SelkieError(code, message);

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

// 14192160 -> "13.5 MiB"
export function size(bytes) {
  const [unit, name] = UNITS.find(([unit]) => bytes >= unit) ?? [1, "bytes"];
  return `${unit === 1 ? bytes : (bytes / unit).toFixed(1)} ${name}`;
}
