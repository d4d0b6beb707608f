//! An image file as pixels: red, green and blue bytes, turned as its EXIF says, on white where it is transparent.

use std::io::Cursor;

use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};

use crate::util::panics::guarded;

/// Larger images are refused before they are decoded.
pub const MOST_PIXELS: u64 = 100_000_000;

/// Most memory that a decoder may take beside the image itself.
const MOST_BYTES: u64 = 1 << 30;

/// An image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Width and height.
    pub size: [usize; 2],
    /// Red, green and blue of each pixel, row by row.
    pub pixels: Vec<u8>,
}

/// Width and height of an image as it will be seen, from its header.
///
/// # Errors
/// What is no PNG or JPEG, has a damaged header, or more than [`MOST_PIXELS`].
pub fn size_of(file: &[u8]) -> Result<[usize; 2], String> {
    guarded(|| open(file).map(|(_, size, _)| size)).flatten()
}

impl Picture {
    /// Decodes a file.
    ///
    /// # Errors
    /// As [`size_of`]; a file that is damaged or cut short.
    pub fn decode(file: &[u8]) -> Result<Self, String> {
        let decoded = || {
            let (decoder, size, orientation) = open(file)?;
            let mut image = DynamicImage::from_decoder(decoder).map_err(|error| damaged(&error))?;
            image.apply_orientation(orientation);
            Ok(Self { size, pixels: on_white(&image) })
        };
        guarded(decoded).flatten()
    }
}

fn damaged(error: &image::ImageError) -> String {
    format!("is damaged or cut short: {error}")
}

type Opened<'a> = (Box<dyn ImageDecoder + 'a>, [usize; 2], Orientation);

fn open(file: &[u8]) -> Result<Opened<'_>, String> {
    let mut reader = ImageReader::new(Cursor::new(file)).with_guessed_format().map_err(|error| error.to_string())?;
    match reader.format() {
        Some(ImageFormat::Png | ImageFormat::Jpeg) => {}
        Some(format) => return Err(format!("is {format:?}; PNG and JPEG are read\n  hint: convert it")),
        None if file.is_empty() => return Err("is empty".to_owned()),
        None => return Err("is no image: PNG and JPEG are read".to_owned()),
    }
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(MOST_BYTES);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|error| damaged(&error))?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels > MOST_PIXELS {
        return Err(format!(
            "has {width} x {height} pixels, more than {MOST_PIXELS} in all\n  hint: make it smaller; models see a few million at most"
        ));
    }
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let is_turned = matches!(
        orientation,
        Orientation::Rotate90 | Orientation::Rotate270 | Orientation::Rotate90FlipH | Orientation::Rotate270FlipH
    );
    let [width, height] = [width, height].map(|side| side as usize);
    Ok((Box::new(decoder), if is_turned { [height, width] } else { [width, height] }, orientation))
}

/// Red, green and blue bytes. Of 16 bits the upper 8 count.
fn on_white(image: &DynamicImage) -> Vec<u8> {
    match image {
        DynamicImage::ImageLuma16(image) => image.pixels().flat_map(|pixel| [high(pixel.0[0]); 3]).collect(),
        DynamicImage::ImageRgb16(image) => image.pixels().flat_map(|pixel| pixel.0.map(high)).collect(),
        DynamicImage::ImageLumaA16(image) => {
            image.pixels().flat_map(|pixel| blended([high(pixel.0[0]); 3], high(pixel.0[1]))).collect()
        }
        DynamicImage::ImageRgba16(image) => {
            let pixels = image.pixels().map(|pixel| pixel.0.map(high));
            pixels.flat_map(|[r, g, b, alpha]| blended([r, g, b], alpha)).collect()
        }
        image if image.color().has_alpha() => image
            .to_rgba8()
            .pixels()
            .flat_map(|pixel| blended([pixel.0[0], pixel.0[1], pixel.0[2]], pixel.0[3]))
            .collect(),
        image => image.to_rgb8().into_raw(),
    }
}

fn high(number: u16) -> u8 {
    number.to_be_bytes()[0]
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
mod tests {
    use image::{ExtendedColorType, ImageBuffer, ImageEncoder as _, Luma, Rgba};

    use super::*;

    fn png(image: impl Into<DynamicImage>) -> Vec<u8> {
        let (image, mut file): (DynamicImage, _) = (image.into(), Cursor::new(Vec::new()));
        image.write_to(&mut file, ImageFormat::Png).unwrap();
        file.into_inner()
    }

    #[test]
    fn what_is_transparent_lies_on_white_and_of_16_bits_the_upper_count() {
        let image =
            ImageBuffer::from_fn(2, 1, |x, _| if x == 0 { Rgba([10, 20, 30, 0]) } else { Rgba([10, 20, 30, 255_u8]) });
        assert_eq!(Picture::decode(&png(image)).unwrap().pixels, [255, 255, 255, 10, 20, 30]);
        let image = ImageBuffer::from_fn(2, 1, |x, _| Luma([if x == 0 { 0x7fff_u16 } else { 0x80ff }]));
        assert_eq!(Picture::decode(&png(image)).unwrap().pixels, [0x7f, 0x7f, 0x7f, 0x80, 0x80, 0x80]);
    }

    #[test]
    fn what_is_no_whole_image_of_a_decent_size_is_refused() {
        let whole = png(ImageBuffer::from_pixel(20, 10, Luma([7_u8])));
        assert_eq!(size_of(&whole), Ok([20, 10]));
        for (file, reason) in [
            (&b""[..], "is empty"),
            (b"<html></html>", "is no image"),
            (b"GIF89a\x01\x00\x01\x00\x00\x00\x00", "is Gif; PNG and JPEG are read"),
            (&whole[..20], "is damaged or cut short"),
            (&whole[..whole.len() - 30], "is damaged or cut short"),
        ] {
            let error = Picture::decode(file).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
        // A header that promises more than a file can hold.
        let mut bomb = Vec::new();
        let encoder = image::codecs::png::PngEncoder::new(&mut bomb);
        encoder.write_image(&[0; 3], 1, 1, ExtendedColorType::Rgb8).unwrap();
        bomb[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
        let checksum = crc32fast::hash(&bomb[12..29]);
        bomb[29..33].copy_from_slice(&checksum.to_be_bytes());
        let error = size_of(&bomb).unwrap_err();
        assert!(error.contains("65536 x 65536 pixels, more than"), "{error}");
    }

    #[test]
    fn no_bytes_make_a_panic() {
        let whole = png(ImageBuffer::from_fn(9, 7, |x, y| Luma([(x * y) as u8])));
        let mut seed = 1_u32;
        for _ in 0..1000 {
            let mut file = whole.clone();
            for _ in 0..4 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = (seed >> 8) as usize % file.len();
                file[at] = seed as u8;
            }
            // Whatever it is, it is that or an error.
            if let Ok(picture) = Picture::decode(&file) {
                assert_eq!(picture.pixels.len(), 3 * picture.size[0] * picture.size[1]);
            }
        }
    }
}
