"""What of a page's text a person can read: asked of the browser, text on canvases too."""

RECORD_CANVAS_TEXT = """
window.canvasTexts = new Map();
const pen = CanvasRenderingContext2D.prototype, fillText = pen.fillText, clearRect = pen.clearRect;
pen.clearRect = function (...box) { window.canvasTexts.set(this.canvas, []); clearRect.apply(this, box); };
pen.fillText = function (text, x, y) {
  const size = this.measureText(text), m = this.getTransform();
  window.canvasTexts.get(this.canvas).push({
    text, font: parseFloat(this.font.match(/[\\d.]+px/)[0]) / devicePixelRatio,
    left: m.e + x - size.actualBoundingBoxLeft, right: m.e + x + size.actualBoundingBoxRight,
    top: m.f + y - size.actualBoundingBoxAscent, bottom: m.f + y + size.actualBoundingBoxDescent,
  });
  fillText.call(this, text, x, y);
};
"""
"""To be run before the page's own scripts: texts on each canvas since it was cleared, with their boxes [pixel]."""

TEXT_BOXES = """() => {
  const boxes = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement, range = document.createRange();
    if (!node.data.trim() || parent.closest("script, option, title")) continue;
    const style = getComputedStyle(parent), scale = parent.ownerSVGElement ? parent.getScreenCTM().a : 1;
    let clip = { left: -1e6, right: 1e6, top: -1e6, bottom: 1e6 }, ground = "rgba(0, 0, 0, 0)";
    for (let at = parent; at; at = at.parentElement) {
      const looks = getComputedStyle(at), edge = at.getBoundingClientRect();
      if (ground === "rgba(0, 0, 0, 0)") ground = looks.backgroundColor;
      if (looks.overflowY !== "visible" && at !== document.body && at !== document.documentElement)
        clip = { left: Math.max(clip.left, edge.left), right: Math.min(clip.right, edge.right),
                 top: Math.max(clip.top, edge.top), bottom: Math.min(clip.bottom, edge.bottom) };
    }
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      if (!r.width || !r.height || r.bottom <= clip.top + 1 || r.top >= clip.bottom - 1) continue;
      const section = parent.closest("section, header, #banner").getBoundingClientRect();
      const font = scale * parseFloat(style.fontSize), color = parent.ownerSVGElement ? style.fill : style.color;
      const left = Math.max(section.left, clip.left, 0), right = Math.min(section.right, clip.right, innerWidth);
      const top = Math.max(r.top, clip.top), bottom = Math.min(r.bottom, clip.bottom);
      // At the end of a line of the log a space may hang over.
      const slack = parent.tagName === "PRE" ? font / 2 : 1;
      const isWide = r.left < left - 1 || r.right > right + slack;
      const isHigh = top < section.top - 1 || bottom > section.bottom + 1;
      const box = { left: r.left, right: r.right, top, bottom, inside: !isWide && !isHigh };
      boxes.push({ ...box, text: node.data.trim().slice(0, 40), font, color, ground });
    }
  }
  return boxes;
}"""
"""A box for each line of each text that is not scrolled out of its list [CSS pixel]."""

CANVAS_BOXES = """() => [...window.canvasTexts].filter(([canvas]) => canvas.isConnected)
  .map(([{ width, height }, texts]) => texts.map((t) =>
    ({ ...t, inside: t.left >= 0 && t.right <= width && t.top >= 0 && t.bottom <= height })))"""
"""For each canvas with text, its boxes."""

SIDEWAYS = """() => [...document.querySelectorAll("*")].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth
  && ["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX)
  || e === document.documentElement && e.scrollWidth > innerWidth).map((e) => e.id || e.className || e.tagName)"""
"""What has to be scrolled sideways, or is cut off there."""


def overlaps(boxes, tolerance=2.0):
    """Pairs of texts that lie on each other by more than a tolerance in both directions."""
    overlaps, ordered = [], sorted(boxes, key=lambda box: box["top"])
    for i, first in enumerate(ordered):
        for second in ordered[i + 1 :]:
            if second["top"] >= first["bottom"] - tolerance:
                break
            if min(first["right"], second["right"]) - max(first["left"], second["left"]) > tolerance:
                overlaps.append((first["text"], second["text"]))
    return overlaps


def contrast(color, ground):
    """Contrast of two opaque colours as WCAG 2 defines it, from ``rgb(...)``."""
    lighter, darker = sorted((_luminance(color), _luminance(ground)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color):
    channels = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
