//! An image file as pixels: red, green and blue bytes, turned as its EXIF says, on white where it is transparent.

use crate::util::panics::guarded;

mod decoders;
mod orientation;

use decoders::Format;
use orientation::Orientation;

/// Larger images are refused before they are decoded.
pub const MOST_PIXELS: u64 = 100_000_000;

/// Most bytes of the pixels in a file, where some have 16 bits or are transparent.
const MOST_BYTES: u64 = 400 << 20;

/// An image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Width and height.
    pub size: [usize; 2],
    /// Red, green and blue of each pixel, row by row.
    pub pixels: Vec<u8>,
}

/// What the beginning of a file says.
#[derive(Clone, Copy, Debug)]
struct Header {
    /// Width and height of its pixels, before they are turned.
    size: [usize; 2],
    /// Bytes of a pixel.
    pixel_bytes: usize,
    orientation: Orientation,
    odd: Oddities,
}

/// What is seen otherwise than one may expect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oddities {
    /// Whether it has several pictures, of which the first is seen.
    pub moves: bool,
    /// Whether its colors have 16 bits, of which the upper 8 are seen.
    pub is_deep: bool,
    /// Whether some of it may be transparent, and then is on white.
    pub is_transparent: bool,
}

/// Pixels as a decoder has them, row by row.
#[derive(Debug)]
struct Decoded {
    /// Numbers of a pixel: grey, or red, green and blue, and where there are 2 or 4, how little is seen through it.
    channels: usize,
    bytes: Vec<u8>,
}

/// Width and height of an image as it will be seen, from its header.
///
/// # Errors
/// What is no PNG, JPEG, GIF or WebP, has a damaged header or no end, or more than [`MOST_PIXELS`].
pub fn size_of(file: &[u8]) -> Result<[usize; 2], String> {
    header_of(file).map(|(size, _)| size)
}

/// The same, and what is odd about the image.
///
/// # Errors
/// As [`size_of`].
pub fn header_of(file: &[u8]) -> Result<([usize; 2], Oddities), String> {
    let (_, header) = open(file)?;
    Ok((header.orientation.turned_size(header.size), header.odd))
}

impl Picture {
    /// Decodes a file.
    ///
    /// # Errors
    /// As [`size_of`]; a file that is damaged or cut short.
    pub fn decode(file: &[u8]) -> Result<Self, String> {
        let (format, header) = open(file)?;
        let Decoded { channels, bytes } = decoding(|| format.decode(file, header.size))?;
        let [width, height] = header.size;
        if bytes.len() != width * height * channels {
            return Err(damaged(&"it has other pixels than its header says"));
        }
        let pixels = on_white(channels, bytes);
        Ok(Self {
            size: header.orientation.turned_size(header.size),
            pixels: header.orientation.turned(pixels, header.size),
        })
    }
}

impl Picture {
    /// What is in a rectangle of it, whose upper left corner and size are given as width and height.
    #[must_use]
    pub fn part(&self, [left, top]: [usize; 2], [width, height]: [usize; 2]) -> Self {
        let rows = self.pixels.chunks_exact(3 * self.size[0]).skip(top).take(height);
        let pixels = rows.flat_map(|row| &row[3 * left..3 * (left + width)]).copied().collect();
        Self { size: [width, height], pixels }
    }
}

fn open(file: &[u8]) -> Result<(Format, Header), String> {
    let format = Format::of(file)?;
    let header = decoding(|| format.header(file))?;
    let [width, height] = header.size.map(|side| side as u64);
    if width == 0 || height == 0 {
        return Err(damaged(&"it has no pixels"));
    }
    let pixels = width.saturating_mul(height);
    if pixels > MOST_PIXELS || pixels * header.pixel_bytes as u64 > MOST_BYTES {
        return Err(format!(
            "has {width} x {height} pixels of {} bytes, more than {MOST_PIXELS} pixels or {MOST_BYTES} bytes in all\n  hint: \
             make it smaller; models see a few million at most",
            header.pixel_bytes
        ));
    }
    Ok((format, header))
}

/// What a decoder makes, which may panic on odd files.
fn decoding<T>(decode: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    guarded(decode).flatten().map_err(|error| damaged(&error))
}

fn damaged(error: &dyn std::fmt::Display) -> String {
    format!("is damaged or cut short: {error}")
}

/// Red, green and blue bytes.
fn on_white(channels: usize, bytes: Vec<u8>) -> Vec<u8> {
    match channels {
        1 => bytes.into_iter().flat_map(|grey| [grey; 3]).collect(),
        2 => bytes.chunks_exact(2).flat_map(|pixel| blended([pixel[0]; 3], pixel[1])).collect(),
        4 => bytes.chunks_exact(4).flat_map(|pixel| blended([pixel[0], pixel[1], pixel[2]], pixel[3])).collect(),
        _ => bytes,
    }
}

/// A color on white.
fn blended(color: [u8; 3], alpha: u8) -> [u8; 3] {
    let alpha = u16::from(alpha);
    color.map(|part| {
        let sum = u16::from(part) * alpha + 255 * (255 - alpha) + 127;
        u8::try_from(sum / 255).unwrap_or(u8::MAX)
    })
}

#[cfg(test)]
mod tests;
