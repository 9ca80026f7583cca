// Before the first paint: the theme that was chosen, else the system's.
document.documentElement.dataset.theme = localStorage.getItem("readie-theme") || "";
