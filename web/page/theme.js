// Runs before the first paint, so that a chosen theme does not flash. Not a module, because modules run later.
try {
  const theme = JSON.parse(localStorage.getItem("selkie.theme") ?? "null");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* Storage is denied: use the system's theme. */ }
