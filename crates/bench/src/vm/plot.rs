//! Clones against time and memory, as a picture: a line a way, one panel for each.
use std::fmt::Write as _;

use super::Record;
use crate::record::median;

/// The numbers of clones that are measured.
pub const COUNTS: [u32; 3] = [1, 10, 50];

/// The ways, and their colours.
const WAYS: [(&str, &str); 3] = [
    ("Stillframe, clones of a template", "#4878a8"),
    ("Stillframe, clones out of a pool", "#60a060"),
    ("QEMU, its template", "#d08040"),
];

const WIDTH: f64 = 330.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 62.0;
const TOP: f64 = 84.0;
const BETWEEN: f64 = 90.0;

/// What a panel shows: its title, and the value of one clone's number for so many clones.
struct Panel {
    title: &'static str,
    number: &'static str,
    of_each: bool,
}

const PANELS: [Panel; 2] = [
    Panel {
        title: "ms until all run",
        number: "ms",
        of_each: false,
    },
    Panel {
        title: "MiB of all together",
        number: "MiB each",
        of_each: true,
    },
];

/// Draws the picture as SVG.
pub fn draw(record: &Record) -> String {
    let width = 2.0 * (LEFT + WIDTH) + BETWEEN;
    let height = TOP + HEIGHT + 46.0;
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"
    );
    for (place, (name, colour)) in (0_u32..).zip(WAYS) {
        let x = LEFT + 262.0 * f64::from(place);
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"14\" width=\"14\" height=\"14\" fill=\"{colour}\"/>"
        );
        text(&mut out, (x + 20.0, 26.0), "start", name);
    }
    for (place, panel) in (0_u32..).zip(&PANELS) {
        let left = LEFT + f64::from(place) * (WIDTH + BETWEEN);
        draw_panel(&mut out, record, panel, left);
    }
    out.push_str("</svg>\n");
    out
}

fn draw_panel(out: &mut String, record: &Record, panel: &Panel, left: f64) {
    let points = WAYS.map(|(way, _)| points(record, panel, way));
    let most = points.iter().flatten().map(|point| point.1);
    let most = most.fold(1.0, f64::max);
    let last = f64::from(COUNTS[COUNTS.len() - 1]);
    let place = |(clones, value): (u32, f64)| {
        let x = left + WIDTH * f64::from(clones) / last;
        (x, TOP + HEIGHT * (1.0 - value / most))
    };
    text(out, (left, TOP - 18.0), "start", panel.title);
    for part in 0_u32..=4 {
        let value = most * f64::from(part) / 4.0;
        let (_, y) = place((0, value));
        let right = left + WIDTH;
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#d8d8d8\"/>"
        );
        text(out, (left - 8.0, y + 4.0), "end", &format!("{value:.0}"));
    }
    for count in COUNTS {
        let (x, y) = place((count, 0.0));
        text(out, (x, y + 20.0), "middle", &count.to_string());
    }
    let middle = (left + WIDTH / 2.0, TOP + HEIGHT + 38.0);
    text(out, middle, "middle", "clones at once");
    for (points, (_, colour)) in points.iter().zip(WAYS) {
        let places = points.iter().map(|point| place(*point));
        let corners = places.clone().map(|(x, y)| format!("{x:.1},{y:.1}"));
        let corners = corners.collect::<Vec<_>>().join(" ");
        let _ = writeln!(
            out,
            "<polyline points=\"{corners}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        );
        for (x, y) in places {
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"
            );
        }
    }
}

/// What was measured of a way, for each number of clones that it was measured with.
fn points(record: &Record, panel: &Panel, way: &str) -> Vec<(u32, f64)> {
    let row = record.rows.iter().find(|row| row.what == way);
    let point = |count: u32| {
        let name = format!("{count}: {}", panel.number);
        let values = row?.numbers.get(name.as_str())?;
        let value = median(values)?;
        let clones = if panel.of_each { f64::from(count) } else { 1.0 };
        Some((count, value * clones))
    };
    COUNTS.into_iter().filter_map(point).collect()
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_a_line_with_its_points() {
        let mut record = Record::of_tests();
        for (count, value) in [("1: ms", 10.0), ("10: ms", 50.0), ("50: ms", 100.0)] {
            record.add(WAYS[0].0, count, value);
            record.add(WAYS[2].0, count, 2.0 * value);
        }
        let picture = draw(&record);
        assert_eq!(picture.matches("<polyline").count(), 6);
        assert_eq!(picture.matches("<circle").count(), 6);
        // Twice as long is at the top, half as long in the middle.
        let middle = TOP + HEIGHT / 2.0;
        assert!(
            picture.contains(&format!("cx=\"392.0\" cy=\"{TOP:.1}\"")),
            "{picture}"
        );
        assert!(
            picture.contains(&format!("cx=\"392.0\" cy=\"{middle:.1}\"")),
            "{picture}"
        );
    }
}
