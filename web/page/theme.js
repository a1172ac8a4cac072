// Before the first paint, so that a chosen theme does not flash. Not a module: those run later.
try {
  const theme = JSON.parse(localStorage.getItem("selkie.theme") ?? "null");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* Storage is denied: the system's theme it is. */ }
