//! The picture: all that matters fits on 80 columns and 24 lines; larger windows show more of the curves.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Clear, Dataset, GraphType, Paragraph, Sparkline, Wrap};

use super::state::{DashboardState, PARTS, Question};
use crate::measure::figures::evaluation::{EvalFigure, Group};
use crate::util::text::{bytes, duration, thousands};

const TRAIN: Color = Color::Cyan;
const EVAL: Color = Color::Yellow;
/// Columns of the figures beside the loss.
const FIGURES_WIDTH: u16 = 30;
/// Lines of a small curve, frame included.
const CURVE_HEIGHT: u16 = 5;
/// Ratio of highest to lowest loss from which the axis is logarithmic, as in the report.
const LOG_ABOVE: f64 = 8.0;
/// Least lines for a sample below the figures, frame included.
const SAMPLE_HEIGHT: u16 = 6;

pub(super) fn draw(frame: &mut Frame<'_>, state: &DashboardState) {
    let area = frame.area();
    let curves = if area.height >= 18 { CURVE_HEIGHT } else { 0 };
    let [title, progress, main, small, time, finding, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(curves),
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(1),
    ])
    .areas(area);
    draw_title(frame, title, state);
    draw_progress(frame, progress, state);
    let figures_width = if area.width >= 60 { FIGURES_WIDTH } else { area.width };
    let [loss, figures] = Layout::horizontal([Constraint::Min(0), Constraint::Length(figures_width)]).areas(main);
    draw_loss(frame, loss, state);
    draw_figures(frame, figures, state);
    draw_curves(frame, small, state);
    frame.render_widget(Line::from(time_text(state)), time);
    draw_finding(frame, finding, state);
    frame.render_widget(Line::from(keys_text(state)), keys);
    draw_question(frame, area, state);
}

/// The run on the left, its progress on the right.
fn draw_title(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    let done = state.done();
    let what = match (&state.work, state.remaining_seconds()) {
        (Some(work), _) => work.clone(),
        (None, Some(seconds)) => format!("{} left", duration(seconds)),
        (None, None) => "starting".to_owned(),
    };
    let progress = format!("step {done}/{}  {:.0}%  {what}", state.total_steps, 100.0 * ratio(state));
    let width = u16::try_from(progress.chars().count()).unwrap_or(u16::MAX);
    let [left, right] = Layout::horizontal([Constraint::Min(0), Constraint::Length(width)]).areas(area);
    frame.render_widget(Line::from(Span::styled(state.label.as_str(), Modifier::BOLD)), left);
    frame.render_widget(Line::from(progress), right);
}

fn ratio(state: &DashboardState) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "drawn")]
    let ratio = state.done() as f64 / state.total_steps.max(1) as f64;
    ratio.min(1.0)
}

fn draw_progress(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most the width")]
    let width = (f64::from(area.width) * ratio(state)).round() as usize;
    // A gauge leaves a gap for its label, even for none.
    frame.render_widget(Line::from(Span::styled("█".repeat(width), Color::Blue)), area);
}

fn draw_loss(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    if area.width < 12 || area.height < 4 {
        return;
    }
    let points = || state.losses.points.iter().chain(&state.eval_losses.points);
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (low, high) = range(&mut points().map(|point| point.1));
    let (first, last) = range(&mut points().map(|point| point.0));
    let is_log = low > 0.0 && high / low > LOG_ABOVE;
    let block = Block::bordered().title(loss_title(state, is_log));
    if points().count() == 0 {
        frame.render_widget(block, area);
        return;
    }
    let scaled = |value: f64| if is_log { value.ln() } else { value };
    let drawn = |points: &[(f64, f64)]| points.iter().map(|(x, y)| (*x, scaled(*y))).collect::<Vec<_>>();
    let (losses, eval_losses) = (drawn(&state.losses.points), drawn(&state.eval_losses.points));
    let (low, high) = (scaled(low), scaled(high));
    let margin = if high > low { 0.05 * (high - low) } else { 0.5 };
    let (low, high) = (if is_log { low - margin } else { (low - margin).max(0.0) }, high + margin);
    let last = last.max(first + 1.0);
    let middle = f64::midpoint(low, high);
    let train = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(Style::new().fg(TRAIN))
        .data(&losses);
    let eval = Dataset::default()
        .marker(Marker::Dot)
        .graph_type(GraphType::Scatter)
        .style(Style::new().fg(EVAL))
        .data(&eval_losses);
    let chart = Chart::new(vec![train, eval])
        .block(block)
        .legend_position(None)
        .x_axis(Axis::default().bounds([first, last]).labels([format!("{first:.0}"), format!("{last:.0}")]))
        .y_axis(
            Axis::default()
                .bounds([low, high])
                .labels([low, middle, high].map(|value| format!("{:.2}", if is_log { value.exp() } else { value }))),
        );
    frame.render_widget(chart, area);
}

fn loss_title(state: &DashboardState, is_log: bool) -> Line<'static> {
    let mut spans = vec![Span::raw(if is_log { " loss, logarithmic " } else { " loss " })];
    spans.push(Span::styled("─ train ", TRAIN));
    if !state.eval_losses.points.is_empty() {
        spans.push(Span::styled("• eval ", EVAL));
    }
    Line::from(spans)
}

/// The figures, and the last sample in the room below them.
fn draw_figures(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    let figures = figures(state);
    let height = u16::try_from(figures.len() + 2).unwrap_or(u16::MAX);
    let has_room = area.height.saturating_sub(height) >= SAMPLE_HEIGHT;
    let area = match state.sample.as_ref().filter(|_| has_room) {
        Some((step, text)) => {
            let [above, below] = Layout::vertical([Constraint::Length(height), Constraint::Min(0)]).areas(area);
            let block = Block::bordered().title(format!(" sample @ {step} "));
            frame.render_widget(Paragraph::new(text.as_str()).block(block).wrap(Wrap { trim: true }), below);
            above
        }
        None => area,
    };
    let block = Block::bordered().title(" now ");
    let inner = usize::from(block.inner(area).width);
    let rows = figures.into_iter().map(|(name, value)| {
        let gap = inner.saturating_sub(name.chars().count() + value.chars().count()).max(1);
        Line::from(vec![
            Span::styled(name, Modifier::DIM),
            Span::raw(" ".repeat(gap)),
            Span::styled(value, Modifier::BOLD),
        ])
    });
    frame.render_widget(Paragraph::new(rows.collect::<Vec<_>>()).block(block), area);
}

/// Names and values, the most important first: a small window cuts off the last ones.
fn figures(state: &DashboardState) -> Vec<(String, String)> {
    let (step, eval) = (state.last.as_ref(), state.last_eval.as_ref());
    let mut figures = Vec::new();
    if let Some(step) = step {
        figures.push(("loss".to_owned(), format!("{:.4}", step.loss)));
    }
    if let Some(eval) = eval {
        // The loss of rewarded answers is about 0.
        let has_loss = eval.eval_reward.is_none();
        for figure in EvalFigure::headlines(&[Group::Loss, Group::Answers, Group::Score]) {
            let is_loss = figure.group == Group::Loss;
            let Some(value) = (figure.of)(eval).filter(|_| has_loss || !is_loss) else { continue };
            let at = |value, step| format!("{} @ {step}", figure.text(value).replace('%', " %"));
            figures.push((figure.label("eval "), at(value, eval.step)));
            let best = state.best_eval.filter(|(step, _)| is_loss && *step != eval.step);
            figures.extend(best.map(|(step, loss)| (format!("best {}", figure.label("eval ")), at(loss, step))));
        }
    }
    let Some(step) = step else { return figures };
    let percent = |value: f64| format!("{value:.0} %");
    let optional = [
        ("tokens/s", Some(thousands(step.tokens_per_second))),
        ("step", Some(format!("{:.3} s", step.step_seconds))),
        ("MFU", step.mfu.map(|mfu| format!("{:.1} %", 100.0 * mfu))),
        ("GPU", step.gpu_utilization_percent.map(percent)),
        ("CPU", step.cpu_utilization_percent.map(percent)),
        ("GPU memory", step.gpu_memory_used_bytes.map(bytes)),
        ("host memory", step.host_memory_bytes.map(bytes)),
        ("learning rate", Some(format!("{:.2e}", step.learning_rate))),
        ("grad norm", Some(format!("{:.3}", step.grad_norm))),
        ("GPU power", step.gpu_power_watts.map(|watts| format!("{watts:.0} W"))),
        ("GPU temperature", step.gpu_temperature_celsius.map(|degrees| format!("{degrees:.0} °C"))),
        ("epoch", Some(format!("{:.2}", step.epoch))),
    ];
    figures.extend(optional.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    figures
}

fn draw_curves(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    if area.height < 3 {
        return;
    }
    let on_gpu = state.last.as_ref().is_some_and(|step| step.gpu_utilization_percent.is_some());
    let device = if on_gpu { "GPU" } else { "CPU" };
    let last = |values: &[f64]| values.last().copied();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
    let size = |value: f64| bytes(value as u64);
    let titles = [
        format!(" {} tokens/s ", last(&state.rates).map_or_else(|| "-".to_owned(), thousands)),
        format!(" {device} {} ", last(&state.utilizations).map_or_else(|| "-".to_owned(), |v| format!("{v:.0} %"))),
        format!(" memory {} ", last(&state.memories).map_or_else(|| "-".to_owned(), size)),
    ];
    let curves = [(&state.rates, None), (&state.utilizations, Some(100.0)), (&state.memories, None)];
    let areas: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).areas(area);
    for ((title, (values, highest)), area) in titles.into_iter().zip(curves).zip(areas) {
        let block = Block::bordered().title(title);
        let width = usize::from(block.inner(area).width);
        let shown = &values[values.len().saturating_sub(width)..];
        let highest = highest.unwrap_or_else(|| shown.iter().copied().fold(1.0, f64::max));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 1000")]
        let heights: Vec<u64> =
            shown.iter().map(|value| (1000.0 * value / highest).clamp(0.0, 1000.0) as u64).collect();
        let curve = Sparkline::default().block(block).data(&heights).max(1000).style(Style::new().fg(Color::Green));
        frame.render_widget(curve, area);
    }
}

/// Where the time of the last steps went, the largest part first.
fn time_text(state: &DashboardState) -> String {
    let Some(shares) = state.shares() else { return String::new() };
    let mut parts: Vec<(f64, &str)> = shares.into_iter().zip(PARTS).filter(|(share, _)| *share >= 0.5).collect();
    parts.sort_by(|a, b| b.0.total_cmp(&a.0));
    let parts = parts.iter().map(|(share, name)| format!("{name} {share:.0}%"));
    format!("time: {}", parts.collect::<Vec<_>>().join(", "))
}

/// The last finding or the last warning, whichever came later.
fn draw_finding(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    let (text, color) = match (&state.finding, &state.last_warning) {
        (Some(finding), _) => (finding.clone(), Color::Magenta),
        (None, Some(warning)) => (format!("warning: {warning}"), Color::Yellow),
        (None, None) => return,
    };
    frame.render_widget(Paragraph::new(text).style(Style::new().fg(color)).wrap(Wrap { trim: true }), area);
}

fn keys_text(state: &DashboardState) -> String {
    let warnings = match state.num_warnings {
        0 => String::new(),
        1 => "   1 warning, shown at the end".to_owned(),
        n => format!("   {n} warnings, shown at the end"),
    };
    format!("q stop{warnings}")
}

fn draw_question(frame: &mut Frame<'_>, area: Rect, state: &DashboardState) {
    let lines: &[&str] = match state.question {
        Question::None => return,
        Question::Stop => &[
            "Stop training?",
            "",
            "[s] Stop: finish the micro-batch, save a",
            "    checkpoint; --resume continues from it",
            "[c] Cancel",
        ],
        Question::Stopping => &["Stopping: a checkpoint is being saved"],
    };
    #[expect(clippy::cast_possible_truncation, reason = "a few short lines")]
    let (width, height) = (46.min(area.width), (lines.len() as u16 + 2).min(area.height));
    let popup = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, popup);
    let lines: Vec<Line<'_>> = lines.iter().map(|line| Line::from(*line)).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered()), popup);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::super::{EvalMetrics, Sample, StepMetrics};
    use super::*;
    use crate::measure::figures::tests::full_step;

    fn shown(state: &DashboardState, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(row).collect()
    }

    fn run() -> DashboardState {
        let mut state = DashboardState::new("runs/quickstart", [0, 200]);
        state.pace.started = Instant::now().checked_sub(Duration::from_mins(1));
        state.eval(&EvalMetrics { step: 0, eval_loss: Some(4.0), ..EvalMetrics::default() });
        for step in 1..=50 {
            state.step(&full_step(step));
        }
        state
    }

    #[test]
    fn on_80_columns_and_24_lines_everything_that_matters_is_there() {
        let mut state = run();
        state.warning("two rows were cut\n  hint: none");
        state.finding = Some("INPUT-BOUND: the GPU waited for data 38% of the time".into());
        let lines = shown(&state, 80, 24);
        let text = lines.join("\n");
        for expected in [
            "runs/quickstart",
            "step 50/200  25%  3m00s left",
            "─ train",
            "• eval",
            "2.5000",
            "4.0000 @ 0",
            "1,000 tokens/s",
            "GPU 97 %",
            "memory 12.0 GiB",
            "50.0 %",
            "2.000 s",
            "time: ",
            "INPUT-BOUND: the GPU waited for data 38% of the time",
            "1 warning, shown at the end",
            "q stop",
        ] {
            assert!(text.contains(expected), "`{expected}` is not in:\n{text}");
        }
        // A later warning is shown in its place.
        let mut warned = state.clone();
        warned.warning("the disk is full\n  hint: none");
        let later = shown(&warned, 80, 24).join("\n");
        assert!(later.contains("warning: the disk is full") && !later.contains("INPUT-BOUND"), "{later}");
        // The curve itself: dots of braille.
        assert!(text.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "{text}");
    }

    #[test]
    fn a_loss_that_falls_far_has_a_logarithmic_axis() {
        let mut state = DashboardState::new("run", [0, 1000]);
        for step in 1..=800_u32 {
            let loss = 11.56 * (-f64::from(step) / 200.0).exp();
            state.step(&StepMetrics { step: step.into(), loss, ..StepMetrics::default() });
        }
        // On a linear axis the later half lies in the lowest two lines.
        let lines = shown(&state, 80, 24);
        let is_drawn = |line: &&String| line.chars().take(48).skip(28).any(|c| ('\u{2801}'..='\u{28ff}').contains(&c));
        assert!(lines.iter().filter(is_drawn).count() >= 4, "{}", lines.join("\n"));
        assert!(lines.join("\n").contains("loss, logarithmic"));
        assert!(!shown(&run(), 80, 24).join("\n").contains("logarithmic"));
    }

    #[test]
    fn a_large_window_shows_the_best_evaluation_and_the_last_sample() {
        let mut state = run();
        for (step, eval_loss) in [(20, 2.0), (40, 2.5)] {
            state.eval(&EvalMetrics { step, eval_loss: Some(eval_loss), ..EvalMetrics::default() });
        }
        state.sample(&Sample { step: 40, prompt: "Once".into(), text: "upon a time".into(), reward: None });
        let large = shown(&state, 200, 50).join("\n");
        for expected in ["2.0000 @ 20", "2.5000 @ 40", "sample @ 40", "Once > upon a time"] {
            assert!(large.contains(expected), "`{expected}` is not in:\n{large}");
        }
        assert!(!shown(&state, 80, 24).join("\n").contains("sample @"));
    }

    #[test]
    fn the_bar_has_no_gap() {
        let mut state = run();
        for step in 51..=172 {
            state.step(&full_step(step));
        }
        assert_eq!(shown(&state, 80, 24)[1].trim_end(), "█".repeat(69));
    }

    #[test]
    fn without_a_gpu_the_processor_takes_its_place() {
        let mut state = DashboardState::new("run", [0, 10]);
        let on_cpu = StepMetrics {
            step: 1,
            host_memory_bytes: Some(45 << 20),
            cpu_utilization_percent: Some(38.0),
            ..StepMetrics::default()
        };
        state.step(&on_cpu);
        let text = shown(&state, 80, 24).join("\n");
        assert!(text.contains("CPU 38 %") && text.contains("memory 45 MiB") && !text.contains("GPU"), "{text}");
    }

    #[test]
    fn any_window_can_be_drawn_in_any_state() {
        let mut nothing = DashboardState::new("run", [0, 0]);
        let mut full = run();
        full.losses.push(51.0, 2.5);
        for question in [Question::None, Question::Stop, Question::Stopping] {
            (nothing.question, full.question) = (question, question);
            for (width, height) in [(1, 1), (10, 3), (40, 10), (60, 16), (80, 24), (200, 60)] {
                shown(&nothing, width, height);
                shown(&full, width, height);
            }
        }
        assert!(shown(&full, 80, 24).join("\n").contains("Stopping: a checkpoint is being saved"));
    }
}
