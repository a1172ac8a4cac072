// Errors for the page: a code for programs and a sentence for people.

export class SelkieError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = "SelkieError";
    this.code = code;
  }
}

// Converts anything thrown to a SelkieError; `code` is used for errors without a code.
export function asSelkieError(thrown, code = "internal") {
  if (thrown instanceof SelkieError) return thrown;
  if (thrown?.name === "AbortError") return new SelkieError("cancelled", "The load was cancelled.");
  if (typeof thrown?.code === "string") return new SelkieError(thrown.code, thrown.message, { cause: thrown });
  const message = thrown?.message ?? String(thrown);
  return new SelkieError(code, code === "internal" ? `selkie failed: ${message}` : message, { cause: thrown });
}

// Messages between worker and page do not preserve the class and code of errors.
export const packError = (error) => ({ code: error.code, message: error.message });
export const unpackError = ({ code, message }) => new SelkieError(code, message);

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

// 15637728 -> "14.9 MiB"
export function size(bytes) {
  const [unit, name] = UNITS.find(([unit]) => bytes >= unit) ?? [1, "bytes"];
  return `${unit === 1 ? bytes : (bytes / unit).toFixed(1)} ${name}`;
}
