// A wide table scrolls in a box that the theme puts around it: let the keyboard reach the box.
function reach() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    box.tabIndex = 0;
  }
}
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
