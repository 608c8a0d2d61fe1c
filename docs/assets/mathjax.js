// MathJax 3.2.2 and all that it needs lie beside this file. It is loaded where a page has a formula.
if (document.querySelector(".arithmatex")) {
  window.MathJax = {
    loader: { load: ["core", "input/tex-base", "[tex]/ams", "output/chtml"] },
    tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], packages: ["base", "ams"] },
    options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
  };
  const startup = document.createElement("script");
  startup.src = new URL("mathjax/startup.js", document.currentScript.src).href;
  document.head.append(startup);
}
