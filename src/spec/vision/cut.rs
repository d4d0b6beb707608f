//! What is seen of an image: how large, in one piece or in several, and what stands for it in a text.

use std::ops::RangeInclusive;

/// What becomes of images of any size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cutting {
    /// Seen as a whole, smaller where it is longer than the tower takes; every row of its tokens is ended (Pixtral).
    Whole {
        /// Longer images are made smaller.
        longest_edge: usize,
    },
    /// Made larger or smaller, cut into squares that are seen one by one, and then seen as one square (Idefics 3).
    Squares {
        /// The longer side before it is cut.
        longest_edge: usize,
        /// Pixels on a side of a square.
        side: usize,
        /// Whether it is cut at all.
        is_cut: bool,
    },
    /// Stretched to as many squares as fit its shape best; where these are several, it is seen as one square too (`InternVL`).
    Canvas {
        /// Pixels on a side of a square.
        side: usize,
        /// At least so many squares.
        least: usize,
        /// At most so many.
        most: usize,
    },
    /// Seen as a whole, larger or smaller where its area is not within bounds (Qwen).
    Area {
        /// Pixels on a side of a token.
        side: usize,
        /// Pixels at least, about.
        least: usize,
        /// Pixels at most.
        most: usize,
    },
    /// The same, where an image that is thinner than a token is first made larger (`PaddleOCR-VL`).
    Page {
        /// Pixels on a side of a token.
        side: usize,
        /// Pixels at least, about.
        least: usize,
        /// Pixels at most.
        most: usize,
    },
    /// Seen as one square, into which it is stretched (Gemma 3).
    Square {
        /// Pixels on its side.
        side: usize,
    },
}

/// What is seen of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Width and height that it is resized to, one after the other.
    pub sizes: Vec<[usize; 2]>,
    /// Into how many rows and columns it is cut then; beside these, all of it is seen in the size of one.
    pub squares: Option<Grid>,
    /// Whether that is made of the image as it was, not of what it was resized to.
    pub is_seen_as_it_was: bool,
    /// Tokens of each piece.
    pub tokens: Grid,
}

/// Things in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// How many rows.
    pub rows: usize,
    /// How many in each.
    pub columns: usize,
}

impl Grid {
    /// All of them.
    #[must_use]
    pub fn count(self) -> usize {
        self.rows * self.columns
    }
}

/// Idefics 3 resizes to this at most.
pub(super) const MOST_EDGE: usize = 4096;

impl Cutting {
    /// What a chat template writes for an image.
    #[must_use]
    pub fn marker(self) -> &'static str {
        match self {
            Self::Whole { .. } => "[IMG]",
            Self::Squares { .. } => "<image>",
            Self::Canvas { .. } => "<IMG_CONTEXT>",
            Self::Area { .. } => "<|vision_start|><|image_pad|><|vision_end|>",
            Self::Page { .. } => "<|IMAGE_PLACEHOLDER|>",
            Self::Square { .. } => "<start_of_image>",
        }
    }

    pub(super) fn square(self) -> Option<usize> {
        match self {
            Self::Whole { .. } | Self::Area { .. } | Self::Page { .. } => None,
            Self::Squares { side, .. } | Self::Canvas { side, .. } | Self::Square { side } => Some(side),
        }
    }

    pub(super) fn cut(self, size: [usize; 2], most: Option<usize>, token_pixels: usize) -> Result<Cut, String> {
        match self {
            Self::Whole { longest_edge } => whole(size, longest_edge, most, token_pixels),
            Self::Square { side } => {
                let (sizes, tokens) = (vec![[side; 2]], side / token_pixels);
                let tokens = Grid { rows: tokens, columns: tokens };
                Ok(Cut { sizes, squares: None, is_seen_as_it_was: false, tokens })
            }
            Self::Area { side, least, most: most_pixels } => {
                let most = most.map_or(most_pixels, |most| most.min(most_pixels));
                within(size, [least.min(most), most], side)
            }
            Self::Page { side, least, most: most_pixels } => {
                Self::Area { side, least, most: most_pixels }.cut(widened(size, side), most, token_pixels)
            }
            Self::Canvas { side, least, most: most_squares } => {
                let most = most.map_or(most_squares, |most| (most / (side * side)).clamp(1, most_squares));
                let squares = canvas(size, side, least.min(most)..=most);
                let tokens = side / token_pixels;
                Ok(Cut {
                    sizes: vec![[squares.columns * side, squares.rows * side]],
                    squares: (squares.count() > 1).then_some(squares),
                    is_seen_as_it_was: true,
                    tokens: Grid { rows: tokens, columns: tokens },
                })
            }
            Self::Squares { longest_edge, side, is_cut } => {
                let cut = |edge: usize| squares(size, edge, side, is_cut);
                let of_pixels = |edge: &usize| cut(*edge).sizes[1].iter().product::<usize>();
                let fits = |edge: &usize| most.is_none_or(|most| of_pixels(edge) <= most);
                // Less where that is asked for, in whole squares.
                let smaller = (1..longest_edge.div_ceil(side)).rev().map(|squares| squares * side);
                let edge = [longest_edge].into_iter().chain(smaller).find(fits).unwrap_or(side.min(longest_edge));
                let tokens = side / token_pixels;
                Ok(Cut { tokens: Grid { rows: tokens, columns: tokens }, ..cut(edge) })
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "as Python computes it")]
fn whole(
    [width, height]: [usize; 2],
    longest_edge: usize,
    most: Option<usize>,
    token_pixels: usize,
) -> Result<Cut, String> {
    let longest = longest_edge as f64;
    let of_area = most.map_or(0.0, |most| ((width * height) as f64 / most as f64).sqrt());
    let ratio = (height as f64 / longest).max(width as f64 / longest).max(of_area);
    let resized = |side: usize| if ratio > 1.0 { divided(side, ratio) } else { side };
    let [columns, rows] = [width, height].map(|side| resized(side).div_ceil(token_pixels));
    if rows * columns == 0 {
        return Err(format!("has {width} x {height} pixels, too thin to be made smaller"));
    }
    let sizes = vec![[columns * token_pixels, rows * token_pixels]];
    Ok(Cut { sizes, squares: None, is_seen_as_it_was: false, tokens: Grid { rows, columns } })
}

/// Each side becomes that of the nearest number of tokens, and both keep their shape where the area is less or more.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn within(size: [usize; 2], [least, most]: [usize; 2], token_pixels: usize) -> Result<Cut, String> {
    let [width, height] = size.map(|side| side as f64);
    if width.max(height) / width.min(height) > 200.0 {
        return Err(format!("has {width} x {height} pixels, and one side may be 200 times the other at most"));
    }
    let side = token_pixels as f64;
    let tokens = |of: &dyn Fn(f64) -> f64| [width, height].map(|length| of(length) as usize);
    let nearest = tokens(&|length| (length / side).round_ties_even());
    let area = nearest[0] * nearest[1] * token_pixels * token_pixels;
    let [columns, rows] = if area > most {
        let by = (width * height / most as f64).sqrt();
        tokens(&|length| (length / by / side).floor().max(1.0))
    } else if area < least {
        let by = (least as f64 / (width * height)).sqrt();
        tokens(&|length| (length * by / side).ceil())
    } else {
        nearest
    };
    let sizes = vec![[columns * token_pixels, rows * token_pixels]];
    Ok(Cut { sizes, squares: None, is_seen_as_it_was: false, tokens: Grid { rows, columns } })
}

/// Both sides as long as that of a token at least.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn widened([mut width, mut height]: [usize; 2], side: usize) -> [usize; 2] {
    let grown = |other: usize, by: usize| ((other * side) as f64 / by as f64).round_ties_even() as usize;
    if height < side {
        (width, height) = (grown(width, height), side);
    }
    if width < side {
        (width, height) = (side, grown(height, width));
    }
    [width, height]
}

/// The longer side becomes `edge`, then both sides whole squares.
#[expect(clippy::cast_precision_loss, reason = "as Python computes it")]
fn squares([width, height]: [usize; 2], edge: usize, side: usize, is_cut: bool) -> Cut {
    let aspect = width as f64 / height as f64;
    let even = |length: usize| (length + length % 2).max(1);
    let [width, height] =
        if width >= height { [edge, even(divided(edge, aspect))] } else { [even(times(edge, aspect)), edge] };
    let to_squares = |length: usize| length.div_ceil(side) * side;
    let aspect = width as f64 / height as f64;
    let whole = if !is_cut {
        [side, side]
    } else if width >= height {
        let width = to_squares(width);
        [width, to_squares(divided(width, aspect))]
    } else {
        let height = to_squares(height);
        [to_squares(times(height, aspect)), height]
    };
    let [columns, rows] = whole.map(|length| length / side);
    let squares = (rows * columns > 1).then_some(Grid { rows, columns });
    let tokens = Grid { rows: 0, columns: 0 };
    Cut { sizes: vec![[width, height], whole], squares, is_seen_as_it_was: false, tokens }
}

/// The rows and columns of squares whose shape is closest to that of an image; of equal ones the most that the image fills by
/// half.
#[expect(clippy::cast_precision_loss, reason = "as Python computes it")]
fn canvas([width, height]: [usize; 2], side: usize, number: RangeInclusive<usize>) -> Grid {
    let sides = 1..=*number.end();
    let all = sides.clone().flat_map(|columns| sides.clone().map(move |rows| Grid { rows, columns }));
    let mut all: Vec<Grid> = all.filter(|grid| number.contains(&grid.count())).collect();
    all.sort_by_key(|grid| grid.count());
    let (aspect, area) = (width as f64 / height as f64, (width * height) as f64);
    let (mut best, mut closest) = (Grid { rows: 1, columns: 1 }, f64::INFINITY);
    for grid in all {
        let difference = (aspect - grid.columns as f64 / grid.rows as f64).abs();
        let is_filled = area > 0.5 * (side * side * grid.count()) as f64;
        if difference < closest || difference <= closest && is_filled {
            (best, closest) = (grid, difference);
        }
    }
    best
}

/// Python's `int(side * by)`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn times(side: usize, by: f64) -> usize {
    (side as f64 * by) as usize
}

/// Python's `int(side / by)`, which may be another number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn divided(side: usize, by: f64) -> usize {
    (side as f64 / by) as usize
}

impl Cut {
    /// How many pieces are seen.
    #[must_use]
    pub fn num_pieces(&self) -> usize {
        self.squares.map_or(1, |squares| squares.count() + 1)
    }

    /// Tokens that are features.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_pieces() * self.tokens.count()
    }

    /// What stands for the image in a text.
    #[must_use]
    pub fn text(&self, cutting: Cutting) -> String {
        let marker = cutting.marker();
        match cutting {
            Cutting::Whole { .. } => {
                let row = marker.repeat(self.tokens.columns);
                format!("{}[IMG_END]", vec![row; self.tokens.rows].join("[IMG_BREAK]"))
            }
            Cutting::Page { .. } => marker.repeat(self.num_tokens()),
            Cutting::Canvas { .. } => format!("<img>{}</img>", marker.repeat(self.num_tokens())),
            Cutting::Square { .. } => {
                let tokens = "<image_soft_token>".repeat(self.num_tokens());
                format!("\n\n<start_of_image>{tokens}<end_of_image>\n\n")
            }
            Cutting::Area { .. } => {
                format!("<|vision_start|>{}<|vision_end|>", "<|image_pad|>".repeat(self.num_tokens()))
            }
            Cutting::Squares { .. } => {
                const AROUND: &str = "<fake_token_around_image>";
                let piece = marker.repeat(self.tokens.count());
                let Grid { rows, columns } = self.squares.unwrap_or(Grid { rows: 0, columns: 0 });
                let of_row = |row: usize| {
                    let square = |column: usize| format!("{AROUND}<row_{row}_col_{column}>{piece}");
                    (1..=columns).map(square).chain(["\n".to_owned()]).collect::<String>()
                };
                let before = if rows == 0 { "" } else { "\n" };
                let squares: String = (1..=rows).map(of_row).collect();
                format!("{squares}{before}{AROUND}<global-img>{piece}{AROUND}")
            }
        }
    }
}
