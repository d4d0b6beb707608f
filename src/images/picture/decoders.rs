//! The formats of image files, each with a crate that decodes it.

use std::io::{Cursor, Read};
use std::num::NonZeroU64;

use image_webp::WebPDecoder;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::options::DecoderOptions;
use zune_png::PngDecoder;

use super::{Decoded, Header, MOST_BYTES, Oddities, Orientation};

/// A format that is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Format {
    Png,
    Jpeg,
    Gif,
    WebP,
}

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const READ: &str = "PNG, JPEG, GIF and WebP are read";
const CUT_SHORT: &str = "its end is missing";

/// The last chunk of a PNG.
const PNG_END: &[u8] = b"\0\0\0\0IEND\xaeB`\x82";

/// Where other formats have which bytes.
const OTHERS: [(usize, &[u8], &str); 7] = [
    (0, b"BM", "a BMP"),
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
    (4, b"ftypavi", "an AVIF"),
    (4, b"ftyphei", "a HEIC"),
    (4, b"ftypmif1", "a HEIC"),
    (0, b"%PDF", "a PDF"),
];

impl Format {
    /// By the content of a file.
    pub(super) fn of(file: &[u8]) -> Result<Self, String> {
        let has = |at: usize, bytes: &[u8]| file.get(at..).is_some_and(|file| file.starts_with(bytes));
        if has(0, PNG) {
            return Ok(Self::Png);
        }
        if has(0, b"\xff\xd8\xff") {
            return Ok(Self::Jpeg);
        }
        if has(0, b"GIF8") {
            return Ok(Self::Gif);
        }
        if has(0, b"RIFF") && has(8, b"WEBP") {
            return Ok(Self::WebP);
        }
        let other = OTHERS.iter().find(|(at, bytes, _)| has(*at, bytes));
        Err(match other {
            Some((_, _, name)) => format!("is {name}; {READ}\n  hint: convert it"),
            None if file.is_empty() => "is empty".to_owned(),
            None if file.starts_with(b"version https://git-lfs") => {
                "is a Git LFS pointer, not the image\n  hint: run `git lfs pull` in its folder".to_owned()
            }
            None if file.trim_ascii_start().starts_with(b"<") => format!("is no image but HTML or SVG: {READ}"),
            None => format!("is no image: {READ}"),
        })
    }

    /// What the beginning says, of a file that is not cut short as far as its format shows.
    pub(super) fn header(self, file: &[u8]) -> Result<Header, String> {
        match self {
            Self::Png => Ok(Chunks::of(file)?.header),
            Self::Jpeg => jpeg_header(file),
            Self::Gif => {
                let mut options = gif::DecodeOptions::new();
                options.skip_frame_decoding(true);
                let mut decoder = opened_gif(options, file)?;
                let size = [decoder.width(), decoder.height()].map(usize::from);
                let first = decoder.read_next_frame().map_err(|error| error.to_string())?;
                let is_transparent = first.is_some_and(|frame| frame.transparent.is_some());
                let moves = decoder.next_frame_info().is_ok_and(|next| next.is_some());
                let odd = Oddities { moves, is_transparent, ..Oddities::default() };
                Ok(Header { size, pixel_bytes: 4, orientation: Orientation::AS_IT_IS, odd })
            }
            Self::WebP => {
                let mut decoder = webp(file)?;
                let size = <[u32; 2]>::from(decoder.dimensions()).map(|side| side as usize);
                let exif = decoder.exif_metadata().ok().flatten().unwrap_or_default();
                let (moves, is_transparent) = (decoder.is_animated(), decoder.has_alpha());
                let odd = Oddities { moves, is_transparent, ..Oddities::default() };
                Ok(Header { size, pixel_bytes: 4, orientation: Orientation::of_exif(&exif), odd })
            }
        }
    }

    /// The pixels, as many as the header says.
    pub(super) fn decode(self, file: &[u8], size: [usize; 2]) -> Result<Decoded, String> {
        match self {
            Self::Png => decoded_png(file),
            Self::Jpeg => decoded_jpeg(file),
            Self::Gif => decoded_gif(file, size),
            Self::WebP => {
                let mut decoder = webp(file)?;
                let mut bytes = vec![0; decoder.output_buffer_size().ok_or("it is too large")?];
                decoder.read_image(&mut bytes).map_err(|error| error.to_string())?;
                Ok(Decoded { channels: if decoder.has_alpha() { 4 } else { 3 }, bytes })
            }
        }
    }
}

/// Sizes are bounded before anything is decoded.
fn options() -> DecoderOptions {
    DecoderOptions::default().set_max_width(usize::MAX).set_max_height(usize::MAX).png_set_strip_to_8bit(true)
}

fn jpeg_header(file: &[u8]) -> Result<Header, String> {
    if !has_end(file) {
        return Err(CUT_SHORT.to_owned());
    }
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options());
    decoder.decode_headers().map_err(|error| error.to_string())?;
    let size = <[usize; 2]>::from(decoder.dimensions().ok_or("it says no size")?);
    let orientation = decoder.exif().map_or(Orientation::AS_IT_IS, |exif| Orientation::of_exif(exif));
    Ok(Header { size, pixel_bytes: 3, orientation, odd: Oddities::default() })
}

fn decoded_jpeg(file: &[u8]) -> Result<Decoded, String> {
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options());
    let bytes = decoder.decode().map_err(|error| error.to_string())?;
    Ok(Decoded { channels: 3, bytes })
}

/// Whether a JPEG's pixels are followed by its end: of a file that is cut short, the decoder makes the rest grey.
fn has_end(file: &[u8]) -> bool {
    const END: [u8; 2] = [0xff, 0xd9];
    let mut at = 2;
    while let Some([before, marker, high, low]) = file.get(at..).and_then(|rest| rest.first_chunk()) {
        at += match (before, marker) {
            (0xff, 0xda) => return file[at..].windows(2).any(|pair| pair == END),
            (0xff, 1 | 0xd0..=0xd8) => 2,
            (0xff, 2..=0xfe) => 2 + usize::from(u16::from_be_bytes([*high, *low])),
            _ => 1,
        };
    }
    false
}

/// What is seen of a PNG: without its texts and profiles, which may be compressed and of any size, and without what follows the
/// first picture.
struct Chunks {
    header: Header,
    file: Vec<u8>,
}

impl Chunks {
    fn of(file: &[u8]) -> Result<Self, String> {
        let mut kept = PNG.to_vec();
        let (mut header, mut is_palette, mut has_pixels, mut at) = (None, false, false, PNG.len());
        let (mut orientation, mut odd) = (Orientation::AS_IT_IS, Oddities::default());
        loop {
            // As in Pillow, the last chunk may be missing, and what is cut short may not be of the picture.
            let rest = &file[at..];
            let is_behind = has_pixels && rest.get(4..8) != Some(b"IDAT");
            let chunk = Chunk::at(rest).or_else(|| Chunk::at(PNG_END).filter(|_| is_behind)).ok_or(CUT_SHORT)?;
            at += chunk.whole.len();
            let is_kept = match chunk.kind {
                b"IHDR" if header.is_none() => {
                    let (found, color) = png_header(chunk.data).ok_or("its header is damaged")?;
                    (header, is_palette, odd) = (Some(found), color == 3, found.odd);
                    true
                }
                b"PLTE" => is_palette,
                b"tRNS" => {
                    odd.is_transparent = true;
                    true
                }
                b"IDAT" | b"IEND" => true,
                b"acTL" => {
                    odd.moves = true;
                    false
                }
                b"eXIf" => {
                    orientation = Orientation::of_exif(chunk.data);
                    false
                }
                _ => false,
            };
            if !is_kept {
                continue;
            }
            if !chunk.is_intact() {
                return Err(format!("the checksum of its {} is another", String::from_utf8_lossy(chunk.kind)));
            }
            has_pixels |= chunk.kind == b"IDAT";
            kept.extend(chunk.whole);
            if chunk.kind == b"IEND" {
                let header = header.ok_or("it has no header")?;
                return Ok(Self { header: Header { orientation, odd, ..header }, file: kept });
            }
        }
    }
}

struct Chunk<'a> {
    kind: &'a [u8; 4],
    data: &'a [u8],
    whole: &'a [u8],
}

impl<'a> Chunk<'a> {
    fn at(file: &'a [u8]) -> Option<Self> {
        let length = u32::from_be_bytes(*file.first_chunk()?) as usize;
        let whole = file.get(..length + 12)?;
        Some(Self { kind: whole[4..].first_chunk()?, data: &whole[8..length + 8], whole })
    }

    fn is_intact(&self) -> bool {
        let (covered, checksum) = self.whole.split_at(self.whole.len() - 4);
        checksum == crc32fast::hash(&covered[4..]).to_be_bytes()
    }
}

/// With the number of its kind of colors.
fn png_header(data: &[u8]) -> Option<(Header, u8)> {
    let [width, height] = [0, 4].map(|at| data.get(at..).and_then(|rest| rest.first_chunk()).copied());
    let size = [width?, height?].map(|side| u32::from_be_bytes(side) as usize);
    let (depth, color) = (*data.get(8)?, *data.get(9)?);
    // With what `tRNS` may add.
    let channels = if matches!(color, 0 | 4) { 2 } else { 4 };
    let odd = Oddities { is_deep: depth == 16, is_transparent: matches!(color, 4 | 6), ..Oddities::default() };
    let pixel_bytes = channels * if odd.is_deep { 2 } else { 1 };
    Some((Header { size, pixel_bytes, orientation: Orientation::AS_IT_IS, odd }, color))
}

fn decoded_png(file: &[u8]) -> Result<Decoded, String> {
    let Chunks { file, .. } = Chunks::of(file)?;
    let mut decoder = PngDecoder::new_with_options(ZCursor::new(&file), options());
    let bytes = decoder.decode_raw().map_err(|error| format!("{error:?}"))?;
    Ok(Decoded { channels: decoder.colorspace().map_or(0, |colors| colors.num_components()), bytes })
}

/// A GIF may lack what is behind its first picture.
fn opened_gif(options: gif::DecodeOptions, file: &[u8]) -> Result<gif::Decoder<impl Read>, String> {
    options.read_info(file.chain(&b"\0;"[..])).map_err(|error| error.to_string())
}

/// The first picture, on what it does not cover.
fn decoded_gif(file: &[u8], [width, height]: [usize; 2]) -> Result<Decoded, String> {
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::RGBA);
    options.set_memory_limit(NonZeroU64::new(MOST_BYTES).map_or(gif::MemoryLimit::Unlimited, gif::MemoryLimit::Bytes));
    let mut decoder = opened_gif(options, file)?;
    let frame = decoder.read_next_frame().map_err(|error| error.to_string())?.ok_or("it has no picture")?;
    let mut bytes = vec![0; 4 * width * height];
    let [left, top] = [frame.left, frame.top].map(usize::from);
    let covered = usize::from(frame.width).min(width.saturating_sub(left));
    let rows = frame.buffer.chunks_exact(4 * usize::from(frame.width).max(1));
    for (row, under) in rows.zip(bytes.chunks_exact_mut(4 * width).skip(top)) {
        under[4 * left.min(width)..][..4 * covered].copy_from_slice(&row[..4 * covered]);
    }
    Ok(Decoded { channels: 4, bytes })
}

fn webp(file: &[u8]) -> Result<WebPDecoder<Cursor<&[u8]>>, String> {
    let length = file.get(4..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if file.len() < length as usize + 8 {
        return Err(CUT_SHORT.to_owned());
    }
    let mut decoder = WebPDecoder::new(Cursor::new(file)).map_err(|error| error.to_string())?;
    decoder.set_memory_limit(usize::try_from(MOST_BYTES).unwrap_or(usize::MAX));
    Ok(decoder)
}
