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
    /// As `Area`, where pixels count twice, for two frames, and a thin image is first made larger, both sides (GLM).
    Frames {
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
    /// Seen as a whole, as large as so many tokens allow (Gemma 4).
    Budget {
        /// Pixels on a side of a token.
        side: usize,
        /// Tokens at most.
        most: usize,
    },
    /// Seen as a whole, or, where it is large, in tiles and then as a whole (LFM2-VL).
    Tiles(Tiles),
}

/// When an image is cut into tiles, and how large a whole one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Pixels on a side of a token.
    pub token: usize,
    /// Tokens of a whole image, at least, about, and at most.
    pub tokens: [usize; 2],
    /// Images of more pixels are cut.
    pub most_pixels: usize,
    /// Pixels on a side of a tile.
    pub side: usize,
    /// Tiles at least and at most; absent: none is cut.
    pub number: Option<[usize; 2]>,
    /// Whether the whole is seen behind tiles.
    pub has_whole: bool,
}

/// What is seen of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Width and height that it is resized to, one after the other.
    pub sizes: Vec<[usize; 2]>,
    /// Into how many rows and columns it is cut then.
    pub squares: Option<Grid>,
    /// Tokens of each square, or of the image that is not cut.
    pub tokens: Grid,
    /// What all of it is resized to, to be seen behind its squares, and the tokens of that.
    pub behind: Option<([usize; 2], Grid)>,
    /// Whether that is made of the image as it was, not of what it was resized to.
    pub is_seen_as_it_was: bool,
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

    /// Width and height of as many squares of this side.
    fn pixels(self, side: usize) -> [usize; 2] {
        [self.columns * side, self.rows * side]
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
            Self::Squares { .. } | Self::Tiles(_) => "<image>",
            Self::Canvas { .. } => "<IMG_CONTEXT>",
            Self::Area { .. } => "<|vision_start|><|image_pad|><|vision_end|>",
            Self::Page { .. } => "<|IMAGE_PLACEHOLDER|>",
            Self::Square { .. } => "<start_of_image>",
            Self::Frames { .. } | Self::Budget { .. } => "<|image|>",
        }
    }

    pub(super) fn square(self) -> Option<usize> {
        match self {
            Self::Squares { side, .. } | Self::Canvas { side, .. } | Self::Square { side } => Some(side),
            _ => None,
        }
    }

    /// Pixels on a side of a token, where a file beside the model's config says it.
    pub(super) fn token_side(self) -> Option<usize> {
        match self {
            Self::Area { side, .. }
            | Self::Page { side, .. }
            | Self::Frames { side, .. }
            | Self::Budget { side, .. }
            | Self::Tiles(Tiles { token: side, .. }) => Some(side),
            _ => None,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "as Python computes it")]
    pub(super) fn cut(self, size: [usize; 2], most: Option<usize>, token_pixels: usize) -> Result<Cut, String> {
        match self {
            Self::Whole { longest_edge } => whole(size, longest_edge, most, token_pixels),
            Self::Square { side } => {
                let tokens = side / token_pixels;
                Ok(Cut::whole(Grid { rows: tokens, columns: tokens }, token_pixels))
            }
            Self::Area { side, least, most: most_pixels } => {
                let most = most.map_or(most_pixels, |most| most.min(most_pixels));
                within(size, [least.min(most) as f64, most as f64], side)
            }
            Self::Frames { side, least, most: most_pixels } => {
                let most = most.map_or(most_pixels, |most| most_pixels.min(2 * most));
                within(enlarged(size, side), [least.min(most) as f64 / 2.0, most as f64 / 2.0], side)
            }
            Self::Budget { side, most: most_tokens } => {
                budget(size, side, most.map_or(most_tokens, |most| most_tokens.min(most / (side * side)).max(1)))
            }
            Self::Tiles(tiles) => tiles.cut(size, most),
            Self::Page { side, least, most: most_pixels } => {
                Self::Area { side, least, most: most_pixels }.cut(widened(size, side), most, token_pixels)
            }
            Self::Canvas { side, least, most: most_squares } => {
                let most = most.map_or(most_squares, |most| (most / (side * side)).clamp(1, most_squares));
                let squares = canvas(size, side, least.min(most)..=most);
                let tokens = Grid { rows: side / token_pixels, columns: side / token_pixels };
                let is_cut = squares.count() > 1;
                Ok(Cut {
                    sizes: vec![[squares.columns * side, squares.rows * side]],
                    squares: is_cut.then_some(squares),
                    tokens,
                    behind: is_cut.then_some(([side; 2], tokens)),
                    is_seen_as_it_was: true,
                })
            }
            Self::Squares { longest_edge, side, is_cut } => {
                let cut = |edge: usize| squares(size, edge, side, is_cut);
                let of_pixels = |edge: &usize| cut(*edge).sizes[1].iter().product::<usize>();
                let fits = |edge: &usize| most.is_none_or(|most| of_pixels(edge) <= most);
                // Less where that is asked for, in whole squares.
                let smaller = (1..longest_edge.div_ceil(side)).rev().map(|squares| squares * side);
                let edge = [longest_edge].into_iter().chain(smaller).find(fits).unwrap_or(side.min(longest_edge));
                let tokens = Grid { rows: side / token_pixels, columns: side / token_pixels };
                let cut = cut(edge);
                Ok(Cut { tokens, behind: cut.squares.map(|_| ([side; 2], tokens)), ..cut })
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
    Ok(Cut::whole(Grid { rows, columns }, token_pixels))
}

/// Each side becomes that of the nearest number of tokens, and both keep their shape where the area is less or more.
#[expect(clippy::cast_precision_loss, reason = "as Python computes it")]
fn within(size: [usize; 2], area: [f64; 2], token_pixels: usize) -> Result<Cut, String> {
    let [width, height] = size.map(|side| side as f64);
    if width.max(height) / width.min(height) > 200.0 {
        return Err(format!("has {width} x {height} pixels, and one side may be 200 times the other at most"));
    }
    Ok(Cut::whole(nearest(size, area, token_pixels, 0), token_pixels))
}

/// Rows and columns of tokens of an image whose sides have `shortest` at least, where its area is neither less nor more.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn nearest(size: [usize; 2], [least, most]: [f64; 2], token_pixels: usize, shortest: usize) -> Grid {
    let [width, height] = size.map(|side| side as f64);
    let side = token_pixels as f64;
    let tokens = |of: &dyn Fn(f64) -> f64| [width, height].map(|length| of(length) as usize);
    let nearest = tokens(&|length| (length / side).round_ties_even()).map(|tokens| tokens.max(shortest));
    let area = (nearest[0] * nearest[1] * token_pixels * token_pixels) as f64;
    let [columns, rows] = if area > most {
        let by = (width * height / most).sqrt();
        tokens(&|length| (length / by / side).floor().max(1.0))
    } else if area < least {
        let by = (least / (width * height)).sqrt();
        tokens(&|length| (length * by / side).ceil())
    } else {
        nearest
    };
    Grid { rows, columns }
}

/// The most tokens that keep its shape.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn budget([width, height]: [usize; 2], side: usize, most: usize) -> Result<Cut, String> {
    let by = ((most * side * side) as f64 / (width * height) as f64).sqrt();
    let tokens = |length: usize| (by * length as f64 / side as f64).floor() as usize;
    let (rows, columns) = match (tokens(height), tokens(width)) {
        (0, 0) => return Err(format!("has {width} x {height} pixels, too many for so few tokens")),
        (0, _) => (1, (width / height).min(most)),
        (_, 0) => ((height / width).min(most), 1),
        both => both,
    };
    Ok(Cut::whole(Grid { rows, columns }, side))
}

impl Tiles {
    #[expect(clippy::cast_precision_loss, reason = "as Python computes it")]
    fn cut(self, size: [usize; 2], most: Option<usize>) -> Result<Cut, String> {
        let Self { token, tokens: [least, most_tokens], side, .. } = self;
        let area = |tokens: usize| (tokens * token * token) as f64;
        let at_most = most.map_or(most_tokens, |most| (most / (token * token)).clamp(1, most_tokens));
        let whole = nearest(size, [area(least.min(at_most)), area(at_most)], token, 1);
        let of_tile = side / token;
        if whole.count() > most_tokens.max(self.number.map_or(0, |_| of_tile * of_tile)) {
            let [width, height] = size;
            return Err(format!("has {width} x {height} pixels, too thin for {most_tokens} tokens"));
        }
        // Half a token is rounded up to one patch here, which is as much as none.
        let is_large = nearest(size, [0.0, f64::INFINITY], token, 0).count() * token * token > self.most_pixels;
        let number =
            self.number.map(|[least, tiles]| [least, most.map_or(tiles, |most| tiles.min(most / (side * side)))]);
        let Some([fewest, tiles]) = number.filter(|[fewest, tiles]| is_large && fewest <= tiles && *tiles > 1) else {
            return Ok(Cut::whole(whole, token));
        };
        let squares = canvas(size, side, fewest..=tiles);
        let is_cut = squares.count() > 1;
        Ok(Cut {
            sizes: vec![[squares.columns * side, squares.rows * side]],
            squares: is_cut.then_some(squares),
            tokens: Grid { rows: of_tile, columns: of_tile },
            behind: (is_cut && self.has_whole).then(|| (whole.pixels(token), whole)),
            is_seen_as_it_was: true,
        })
    }
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

/// The same, where both sides grow by as much.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "as Python computes it"
)]
fn enlarged(size: [usize; 2], side: usize) -> [usize; 2] {
    let [by_width, by_height] = size.map(|length| side as f64 / length as f64);
    let by = by_width.max(by_height);
    if by > 1.0 { size.map(|length| (length as f64 * by) as usize) } else { size }
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
    Cut { sizes: vec![[width, height], whole], squares, tokens, behind: None, is_seen_as_it_was: false }
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
    /// An image that is seen in one piece, of these tokens.
    fn whole(tokens: Grid, token_pixels: usize) -> Self {
        Self { sizes: vec![tokens.pixels(token_pixels)], squares: None, tokens, behind: None, is_seen_as_it_was: false }
    }

    /// How many pieces are seen.
    #[must_use]
    pub fn num_pieces(&self) -> usize {
        self.num_squares() + usize::from(self.behind.is_some())
    }

    /// Tokens that are features.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_squares() * self.tokens.count() + self.behind.map_or(0, |(_, tokens)| tokens.count())
    }

    fn num_squares(&self) -> usize {
        self.squares.map_or(1, Grid::count)
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
            Cutting::Page { .. } | Cutting::Frames { .. } => marker.repeat(self.num_tokens()),
            Cutting::Budget { .. } => format!("<|image>{}<image|>", marker.repeat(self.num_tokens())),
            Cutting::Tiles(_) => {
                let Grid { rows, columns } = self.squares.unwrap_or(Grid { rows: 0, columns: 0 });
                let places = (1..=rows).flat_map(|row| (1..=columns).map(move |column| (row, column)));
                let tiles = places.map(|(row, column)| format!("<|img_row_{row}_col_{column}|>"));
                let tile = marker.repeat(self.tokens.count());
                let tiles: String = tiles.map(|name| format!("{name}{tile}")).collect();
                let behind =
                    self.behind.map(|(_, tokens)| format!("<|img_thumbnail|>{}", marker.repeat(tokens.count())));
                let whole = if tiles.is_empty() { tile } else { behind.unwrap_or_default() };
                format!("<|image_start|>{tiles}{whole}<|image_end|>")
            }
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
