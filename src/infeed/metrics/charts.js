// Unpacks plotly.js, draws every chart of the page, and draws them again when the page turns dark or light.
"use strict";
(async () => {
  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => ({
    plot: figure.querySelector(".plot"),
    text: figure.querySelector("script").textContent,
  }));

  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };

  // On a phone a finger on a chart must scroll the page, and there is room for fewer words.
  const coarse = matchMedia("(pointer: coarse)");
  const narrow = matchMedia("(max-width: 34rem)");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const template = (style) => {
    const axis = {
      automargin: true, gridcolor: "var(--grid)", linecolor: "var(--line)", zerolinecolor: "var(--line)",
      ticks: "outside", ticklen: 5, tickcolor: "rgba(0,0,0,0)", title: { standoff: 8 },
    };
    return {
      layout: {
        font: { family: style.fontFamily, size: narrow.matches ? 11 : 12.5, color: "var(--soft)" },
        colorway: ["load", "away", "collate", "write", "deliver", "wait"].map((name) => `var(--${name})`),
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 8, r: 8, t: 8, b: 8 },
        xaxis: axis, yaxis: axis,
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
        hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--line)", font: { color: "var(--text)" }, align: "left" },
        hovermode: "closest", bargap: 0.08,
      },
    };
  };

  const paint = (value, style) => {
    if (typeof value === "string") {
      return value.replace(/var\((--[a-z-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((one) => paint(one, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, paint(one, style)]));
    }
    return value;
  };

  const draw = async () => {
    const style = getComputedStyle(document.body);
    for (const { plot, text } of charts) {
      const figure = JSON.parse(text);
      const layout = { ...figure.layout, template: template(style), dragmode: coarse.matches ? false : "zoom" };
      await Plotly.react(plot, paint(figure.data, style), paint(layout, style), {
        responsive: true, displayModeBar: false, showTips: false,
      });
    }
  };

  try {
    const script = document.createElement("script");
    script.textContent = await unpack(document.getElementById("library").textContent);
    document.head.append(script);
    await draw();
    dark.addEventListener("change", draw);
    narrow.addEventListener("change", draw);
    document.documentElement.dataset.charts = "drawn";
  } catch (error) {
    for (const { plot } of charts) {
      plot.classList.add("broken");
      plot.textContent = `This chart could not be drawn: ${error}`;
    }
    document.documentElement.dataset.charts = "broken";
    console.error(error);
  }
})();
