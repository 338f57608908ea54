//! The ratios as a picture: one row a cell, three bars, a line where both programs take the same.
//!
//! Not crate plotters: groups of bars with goals are none of its charts, so the caller places each
//! rectangle and line there, too, and four crates come with it for three SVG elements.
use std::fmt::Write;

use crate::record::Record;
use crate::report::{QUANTITIES, Quantity, goals, ratio, title};

/// The bars of a row, their colours, and which goal belongs to them.
const BARS: &[(&str, &str, Option<usize>)] = &[
    ("dump", "#4878a8", Some(0)),
    ("frozen", "#90b0d0", None),
    ("restore", "#d08040", Some(1)),
];
/// The colour of goals.
const GOAL: &str = "#a02020";
const LEFT: f64 = 330.0;
const WIDTH: f64 = 560.0;
const RIGHT: f64 = 60.0;
const TOP: f64 = 54.0;
const ROW: f64 = 58.0;
const BAR: f64 = 14.0;
/// The ratio at the right end of the axis; longer bars are cut there.
const AXIS_END: f64 = 1.25;

/// Draws the picture as SVG.
pub fn draw(record: &Record) -> String {
    let rows = u32::try_from(record.cells.len()).expect("a handful of cells");
    let height = TOP + ROW * f64::from(rows) + 30.0;
    let width = LEFT + WIDTH + RIGHT;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
    );
    let names: Vec<_> = record
        .tools
        .iter()
        .rev()
        .map(|tool| tool.name.as_str())
        .collect();
    text(
        &mut out,
        12.0,
        22.0,
        "start",
        &format!("{}, less is better", names.join(" / ")),
    );
    for (number, (name, colour, _)) in (0u32..).zip(BARS) {
        let x = LEFT + 110.0 * f64::from(number);
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"11\" width=\"{BAR}\" height=\"{BAR}\" fill=\"{colour}\"/>"
        );
        text(&mut out, x + BAR + 6.0, 22.0, "start", name);
    }
    line(&mut out, LEFT + 337.0, 10.0, 26.0, GOAL, 2.0);
    text(&mut out, LEFT + 344.0, 22.0, "start", "goal");
    axis(&mut out, height);
    for (number, cell) in (0u32..).zip(&record.cells) {
        let y = TOP + ROW * f64::from(number);
        text(&mut out, LEFT - 12.0, y + ROW / 2.0, "end", &title(cell));
        for (place, (name, colour, goal)) in (0u32..).zip(BARS) {
            let y = y + 4.0 + (BAR + 2.0) * f64::from(place);
            let goal = goal.and_then(|index| goals(cell)[index]);
            if let Some(ratio) = ratio(cell, quantity(name)) {
                bar(&mut out, y, ratio, colour, goal);
            }
            if let Some(goal) = goal {
                line(&mut out, x_of(goal), y - 1.0, y + BAR + 1.0, GOAL, 2.0);
            }
        }
    }
    out.push_str("</svg>\n");
    out
}

fn quantity(name: &str) -> &'static Quantity {
    QUANTITIES
        .iter()
        .find(|quantity| quantity.title == name)
        .expect("bars are columns")
}

fn x_of(ratio: f64) -> f64 {
    LEFT + WIDTH * ratio.min(AXIS_END) / AXIS_END
}

fn axis(out: &mut String, height: f64) {
    for quarter in 0u32..=5 {
        let ratio = f64::from(quarter) * 0.25;
        let (colour, wide) = if quarter == 4 {
            ("#202020", 1.5)
        } else {
            ("#d8d8d8", 1.0)
        };
        line(out, x_of(ratio), TOP - 8.0, height - 26.0, colour, wide);
        text(
            out,
            x_of(ratio),
            height - 10.0,
            "middle",
            &format!("{ratio}"),
        );
    }
}

fn bar(out: &mut String, y: f64, ratio: f64, colour: &str, goal: Option<f64>) {
    let width = x_of(ratio) - LEFT;
    let _ = writeln!(
        out,
        "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"{colour}\"/>"
    );
    // The number stands clear of the goal's line.
    let near = goal
        .map(x_of)
        .filter(|x| (0.0..30.0).contains(&(x - x_of(ratio))));
    let x = near.unwrap_or(x_of(ratio)) + 5.0;
    text(out, x, y + BAR - 2.5, "start", &format!("{ratio:.2}"));
}

fn line(out: &mut String, x: f64, from: f64, to: f64, colour: &str, wide: f64) {
    let _ = writeln!(
        out,
        "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{from}\" y2=\"{to}\" stroke=\"{colour}\" \
         stroke-width=\"{wide}\"/>"
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ratio_has_a_bar_and_every_goal_a_line() {
        let picture = draw(&crate::report::tests::halved());
        let half = format!("width=\"{:.1}\"", WIDTH * 0.5 / AXIS_END);
        assert_eq!(
            picture.matches(&half).count(),
            2,
            "dump and restore\n{picture}"
        );
        assert_eq!(picture.matches(GOAL).count(), 3, "and one that explains it");
        assert!(picture.contains(">0.50</text>"));
    }

    #[test]
    fn a_bar_never_leaves_the_picture() {
        assert!(x_of(1000.0) <= LEFT + WIDTH);
    }
}
