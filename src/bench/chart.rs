//! Bar charts as SVG, readable on light and dark pages.

use std::fmt::Write;

/// The bars of one series in one group: one value for each of the two panels.
pub struct Cell<'a> {
    pub group: String,
    pub series: &'a str,
    pub values: [f64; 2],
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 340.0;
/// Left edge, top, width and height of a panel's plot. The second panel is shifted by `PANEL_STEP`.
const LEFT: f64 = 60.0;
const TOP: f64 = 84.0;
const PLOT_WIDTH: f64 = 340.0;
const PLOT_HEIGHT: f64 = 190.0;
const PANEL_STEP: f64 = 430.0;
/// Distinguishable without colour vision.
const COLOURS: [&str; 3] = ["#999999", "#e69f00", "#0072b2"];

/// Two panels next to each other, with a group of bars for every group of `cells`.
pub fn bars(title: &str, groups_are: &str, panels: [&str; 2], cells: &[Cell]) -> String {
    let mut groups: Vec<&str> = cells.iter().map(|c| c.group.as_str()).collect();
    groups.dedup();
    let mut series: Vec<&str> = Vec::new();
    for cell in cells {
        if !series.contains(&cell.series) {
            series.push(cell.series);
        }
    }
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    text(&mut svg, LEFT, 24.0, "start", title);
    for (i, name) in series.iter().enumerate() {
        let x = LEFT + 150.0 * i as f64;
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{}\"/>", COLOURS[i % 3]);
        text(&mut svg, x + 18.0, 46.0, "start", name);
    }
    for (p, name) in panels.iter().enumerate() {
        panel(&mut svg, LEFT + PANEL_STEP * p as f64, name, cells, (&groups, &series), p);
    }
    text(&mut svg, WIDTH / 2.0, HEIGHT - 16.0, "middle", groups_are);
    svg + "</svg>\n"
}

fn panel(svg: &mut String, left: f64, name: &str, cells: &[Cell], (groups, series): (&[&str], &[&str]), p: usize) {
    let top = nice(cells.iter().map(|c| c.values[p]).fold(0.0, f64::max));
    let y = |value: f64| TOP + PLOT_HEIGHT * (1.0 - value / top);
    text(svg, left, TOP - 14.0, "start", name);
    for i in 0..=4 {
        let value = top * f64::from(i) / 4.0;
        let line = y(value);
        let right = left + PLOT_WIDTH;
        let _ = writeln!(svg, "<path d=\"M{left} {line:.1}H{right}\" stroke=\"#dddddd\"/>");
        text(svg, left - 6.0, line + 4.0, "end", &format!("{value}"));
    }
    let group_width = PLOT_WIDTH / groups.len().max(1) as f64;
    let bar = group_width * 0.8 / series.len().max(1) as f64;
    for (g, group) in groups.iter().enumerate() {
        let from = left + group_width * (g as f64 + 0.1);
        for (s, name) in series.iter().enumerate() {
            let Some(cell) = cells.iter().find(|c| c.group == *group && c.series == *name) else { continue };
            let value = cell.values[p];
            let (x, line) = (from + bar * s as f64, y(value));
            let height = TOP + PLOT_HEIGHT - line;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{line:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{}\"/>",
                bar * 0.92,
                COLOURS[s % 3]
            );
            text(svg, x + bar * 0.46, line - 4.0, "middle", &format!("{value:.0}"));
        }
        text(svg, from + group_width * 0.4, TOP + PLOT_HEIGHT + 18.0, "middle", group);
    }
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{content}</text>");
}

/// The smallest 1, 2, 4 or 5 times a power of ten that is at least `value`.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-9).log10().floor());
    [1.0, 2.0, 4.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|n| *n >= value).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_a_bar() {
        let cell = |group: &str, series, value| Cell { group: group.into(), series, values: [value, 2.0 * value] };
        let cells =
            [cell("100 %", "off", 0.0), cell("100 %", "on", 81.0), cell("50 %", "off", 0.0), cell("50 %", "on", 60.0)];
        let svg = bars("a < b", "room", ["share", "rate"], &cells);
        // Background, two legend keys, and four bars in each panel.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 8);
        assert!(svg.contains("a &lt; b") && svg.contains(">81<") && svg.contains(">162<"));
    }

    #[test]
    fn axes_end_on_round_numbers() {
        for (value, end) in [(81.0, 100.0), (100.0, 100.0), (160.0, 200.0), (3100.0, 4000.0), (0.0, 1e-9)] {
            assert!((nice(value) - end).abs() <= 1e-9 * end.max(1.0), "{value}");
        }
    }
}
