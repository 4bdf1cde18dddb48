"""Charts as SVG that need nothing else, in the light and in the dark: what tools/plot_bench.py and tools/compare.py draw with."""

import html

style = """
  .page { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }
  .title { font-size: 17px; font-weight: 600 } .panel { font-size: 13px; font-weight: 600 } .own { font-size: 11px; font-weight: 600 }
  .small { font-size: 11px; fill: #59636e } .grid { stroke: #d1d9e0 } .axis { stroke: #59636e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #f0f6fc } .small { fill: #9198a1 } .grid { stroke: #3d444d } .axis { stroke: #9198a1 }
  }"""


class Drawing:
    def __init__(self):
        self.lines = []

    def text(self, x, y, text, kind="", anchor="start"):
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>')

    def bar(self, x, y, width, height, colour, tip):
        self.lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}">'
                          f'<title>{html.escape(tip)}</title></rect>')

    def vertical(self, x, top, bottom, kind):
        self.lines.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" class="{kind}"/>')

    def horizontal(self, left, right, y, kind):
        self.lines.append(f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" class="{kind}"/>')

    def curve(self, points, colour, dashes=""):
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round" '
                          f'stroke-dasharray="{dashes or "none"}"/>')

    def dot(self, x, y, colour, tip):
        self.lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{html.escape(tip)}</title></circle>')

    def svg(self, width, height, description):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" '
                f'role="img" aria-label="{html.escape(description)}">\n<style>{style}\n</style>\n'
                f'<rect class="page" width="{width}" height="{height:.0f}"/>\n' + "\n".join(self.lines) + "\n</svg>\n")
