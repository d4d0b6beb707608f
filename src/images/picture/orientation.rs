//! How an image is turned before it is seen (EXIF 2.32, tag 0x0112).

/// From 1, as it is, to 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Orientation(u16);

impl Orientation {
    pub(super) const AS_IT_IS: Self = Self(1);

    /// From EXIF, which is the beginning of a TIFF.
    pub(super) fn of_exif(exif: &[u8]) -> Self {
        Self::read(exif.strip_prefix(b"Exif\0\0").unwrap_or(exif)).unwrap_or(Self::AS_IT_IS)
    }

    fn read(tiff: &[u8]) -> Option<Self> {
        const TAG: u16 = 0x0112;
        let is_little = tiff.starts_with(b"II*\0");
        if !is_little && !tiff.starts_with(b"MM\0*") {
            return None;
        }
        let short = |at: usize| {
            let bytes = *tiff.get(at..)?.first_chunk()?;
            Some(if is_little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
        };
        let bytes = *tiff.get(4..)?.first_chunk()?;
        let entries = if is_little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) } as usize;
        let mut tags = (0..usize::from(short(entries)?)).map(|index| entries + 2 + 12 * index);
        let entry = tags.find(|at| short(*at) == Some(TAG))?;
        short(entry + 8).filter(|value| (1..=8).contains(value)).map(Self)
    }

    /// Width and height as they are seen.
    pub(super) fn turned_size(self, [width, height]: [usize; 2]) -> [usize; 2] {
        if self.0 > 4 { [height, width] } else { [width, height] }
    }

    /// Pixels of 3 bytes as they are seen.
    pub(super) fn turned(self, pixels: Vec<u8>, size: [usize; 2]) -> Vec<u8> {
        if self == Self::AS_IT_IS {
            return pixels;
        }
        let [right, bottom] = size.map(|side| side - 1);
        let [width, height] = self.turned_size(size);
        let source = |x: usize, y: usize| match self.0 {
            2 => (right - x, y),
            3 => (right - x, bottom - y),
            4 => (x, bottom - y),
            5 => (y, x),
            6 => (y, bottom - x),
            7 => (right - y, bottom - x),
            8 => (right - y, x),
            _ => (x, y),
        };
        let places = (0..height).flat_map(|y| (0..width).map(move |x| source(x, y)));
        let starts = places.map(|(x, y)| 3 * (y * size[0] + x));
        starts.flat_map(|start| [pixels[start], pixels[start + 1], pixels[start + 2]]).collect()
    }
}
