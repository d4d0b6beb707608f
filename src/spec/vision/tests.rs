use super::*;

const PIXTRAL: Cutting = Cutting::Whole { longest_edge: 1540 };
const SMOLVLM: Cutting = Cutting::Squares { longest_edge: 2048, side: 512, is_cut: true };

#[test]
fn images_become_as_many_tokens_as_pixtral_makes_of_them() {
    // Sizes and rows by columns of `_get_num_multimodal_tokens`.
    for (size, expected) in [
        ([1280, 960], [35, 46]),
        ([1, 1], [1, 1]),
        ([1540, 1540], [55, 55]),
        ([1541, 29], [1, 55]),
        ([4000, 3000], [42, 55]),
        ([3000, 4001], [55, 42]),
    ] {
        let Cut { tokens: Grid { rows, columns }, sizes, squares, .. } = PIXTRAL.cut(size, None, 28).unwrap();
        assert_eq!([rows, columns], expected, "{size:?}");
        assert_eq!((sizes, squares), (vec![[28 * columns, 28 * rows]], None));
    }
    let smaller = PIXTRAL.cut([1280, 960], Some(640 * 480), 28).unwrap();
    assert_eq!(smaller.tokens, Grid { rows: 18, columns: 23 });
    assert_eq!(smaller.text(PIXTRAL).matches("[IMG_BREAK]").count(), 17);
    assert!(PIXTRAL.cut([9000, 1], None, 28).unwrap_err().contains("too thin"));
}

#[test]
fn images_are_cut_into_the_squares_of_smolvlm() {
    let seen = |size, most| SMOLVLM.cut(size, most, 64).unwrap();
    let cut = seen([1280, 960], None);
    assert_eq!(cut.sizes, [[2048, 1536], [2048, 1536]]);
    assert_eq!((cut.squares, cut.num_tokens()), (Some(Grid { rows: 3, columns: 4 }), 13 * 64));
    // Small ones are made larger, thin ones are stretched.
    assert_eq!(seen([1, 1], None).num_pieces(), 17);
    assert_eq!(seen([9000, 50], None).sizes, [[2048, 12], [2048, 512]]);
    assert_eq!(seen([100, 199], None).sizes, [[1030, 2048], [1536, 2048]]);
    let smaller = seen([1280, 960], Some(1 << 20));
    assert_eq!((&smaller.sizes[1], smaller.num_pieces()), (&[1024, 1024], 5));
    let least = seen([1280, 960], Some(1));
    assert_eq!((least.squares, least.num_tokens()), (None, 64));
    let whole = Cutting::Squares { longest_edge: 2048, side: 512, is_cut: false }.cut([1280, 960], None, 64).unwrap();
    assert_eq!((whole.sizes, whole.squares), (vec![[2048, 1536], [512, 512]], None));

    let around = |what: &str, tokens: usize| format!("<fake_token_around_image>{what}{}", "<image>".repeat(tokens));
    let end = "<fake_token_around_image>";
    assert_eq!(least.text(SMOLVLM), around("<global-img>", 64) + end);
    let two = SMOLVLM.cut([100, 50], Some(1024 * 512), 256).unwrap();
    let expected = [
        around("<row_1_col_1>", 4),
        around("<row_1_col_2>", 4),
        "\n\n".to_owned(),
        around("<global-img>", 4),
        end.to_owned(),
    ];
    assert_eq!(two.text(SMOLVLM), expected.concat());
}

#[test]
fn images_keep_their_shape_within_the_areas_of_qwen() {
    let area = Cutting::Area { side: 32, least: 65_536, most: 16_777_216 };
    let seen = |size, most| area.cut(size, most, 32);
    // Sizes and rows by columns of `smart_resize`.
    for (size, rows_by_columns) in [
        ([1280, 960], [30, 40]),
        ([1, 1], [8, 8]),
        ([4000, 3000], [94, 125]),
        ([9000, 50], [2, 281]),
        ([9000, 7000], [112, 145]),
        ([300, 208], [7, 10]),
        ([624, 656], [20, 20]),
        ([16, 48], [14, 5]),
    ] {
        let Cut { tokens: Grid { rows, columns }, sizes, .. } = seen(size, None).unwrap();
        assert_eq!([rows, columns], rows_by_columns, "{size:?}");
        assert_eq!(sizes, [[32 * columns, 32 * rows]]);
    }
    assert_eq!(seen([1280, 960], Some(320 * 240)).unwrap().tokens, Grid { rows: 7, columns: 10 });
    assert_eq!(seen([1280, 960], Some(1)).unwrap().num_tokens(), 1);
    assert!(seen([9000, 44], None).unwrap_err().contains("200 times"));
    let text = seen([32, 32], Some(1024)).unwrap().text(area);
    assert_eq!(text, area.marker());
}

#[test]
fn images_are_stretched_to_the_canvas_of_internvl() {
    let canvas = Cutting::Canvas { side: 448, least: 1, most: 12 };
    let seen = |size, most| canvas.cut(size, most, 28).unwrap();
    // Of 1 x 1, 2 x 2 and 3 x 3 the largest that the image fills by half.
    for (size, squares) in
        [([100, 100], 1), ([640, 640], 4), ([950, 950], 4), ([951, 951], 9), ([1280, 960], 12), ([900, 90], 10)]
    {
        let cut = seen(size, None);
        assert_eq!(cut.squares.map_or(1, Grid::count), squares, "{size:?}");
        assert_eq!(cut.num_tokens(), 256 * if squares == 1 { 1 } else { squares + 1 });
    }
    assert_eq!(seen([1280, 960], None).sizes, [[4 * 448, 3 * 448]]);
    assert_eq!(seen([1280, 960], Some(448 * 448)).sizes, [[448, 448]]);
    let text = seen([100, 100], Some(1)).text(canvas);
    assert!(text.starts_with("<img><IMG_CONTEXT>") && text.ends_with("</img>"));
}

#[test]
fn images_fill_the_tokens_of_gemma_4_and_two_frames_of_glm() {
    let (budget, frames) = (
        Cutting::Budget { side: 48, most: 280 },
        Cutting::Frames { side: 28, least: 112 * 112, most: 28 * 28 * 2 * 6144 },
    );
    // Sizes and rows by columns of `get_aspect_ratio_preserving_size` and of `smart_resize`.
    for (size, of_budget, of_frames) in [
        ([1280, 960], [14, 19], [34, 46]),
        ([1, 1], [16, 16], [3, 3]),
        ([4000, 3000], [14, 19], [67, 90]),
        ([9000, 50], [1, 224], [2, 321]),
        ([300, 208], [13, 20], [7, 11]),
        ([16, 48], [28, 9], [5, 2]),
        ([951, 951], [16, 16], [34, 34]),
    ] {
        for (cutting, side, expected) in [(budget, 48, of_budget), (frames, 28, of_frames)] {
            let Cut { tokens: Grid { rows, columns }, sizes, .. } = cutting.cut(size, None, side).unwrap();
            assert_eq!([rows, columns], expected, "{size:?}");
            assert_eq!(sizes, [[side * columns, side * rows]]);
        }
    }
    let text = budget.cut([1280, 960], Some(48 * 48), 48).unwrap().text(budget);
    assert_eq!(text, "<|image><|image|><image|>");
    assert!(budget.cut([9000, 50], Some(48 * 48), 48).unwrap().num_tokens() == 1);
    assert!(frames.cut([9000, 44], None, 28).unwrap_err().contains("200 times"));
    assert_eq!(frames.cut([280, 280], Some(56 * 56), 28).unwrap().text(frames), "<|image|>".repeat(4));
}

#[test]
fn large_images_are_cut_into_the_tiles_of_lfm2() {
    let tiles = Tiles {
        token: 32,
        tokens: [64, 256],
        most_pixels: 2 * 256 * 32 * 32,
        side: 512,
        number: Some([2, 10]),
        has_whole: true,
    };
    let seen = |tiles: Tiles, size, most| Cutting::Tiles(tiles).cut(size, most, 32);
    // Sizes, rows by columns of tiles and of the whole.
    for (size, of_tiles, of_whole) in [
        ([1280, 960], Some([2, 3]), [13, 18]),
        ([1, 1], None, [8, 8]),
        ([4000, 3000], Some([2, 3]), [13, 18]),
        ([9000, 50], Some([1, 10]), [1, 214]),
        ([300, 208], None, [7, 10]),
        ([16, 48], None, [14, 5]),
        ([951, 951], Some([2, 2]), [16, 16]),
    ] {
        let cut = seen(tiles, size, None).unwrap();
        assert_eq!(cut.squares.map(|Grid { rows, columns }| [rows, columns]), of_tiles, "{size:?}");
        let (_, Grid { rows, columns }) = cut.behind.unwrap_or((cut.sizes[0], cut.tokens));
        assert_eq!([rows, columns], of_whole, "{size:?}");
        let num_tokens = of_tiles.map_or(0, |[rows, columns]| 256 * rows * columns) + of_whole[0] * of_whole[1];
        assert_eq!(cut.num_tokens(), num_tokens, "{size:?}");
    }
    assert!(seen(tiles, [9000, 30], None).unwrap_err().contains("too thin"));
    let fewer = seen(tiles, [1280, 960], Some(2 * 512 * 512)).unwrap();
    assert_eq!((fewer.squares.map(Grid::count), fewer.num_pieces()), (Some(2), 3));
    let least = seen(tiles, [1280, 960], Some(4 * 32 * 32)).unwrap();
    assert_eq!((least.squares, least.num_tokens()), (None, 2));
    assert_eq!(least.text(Cutting::Tiles(tiles)), "<|image_start|><image><image><|image_end|>");
    let without = Tiles { token: 512, has_whole: false, ..tiles };
    let text = seen(without, [1024, 1024], None).unwrap().text(Cutting::Tiles(without));
    assert_eq!(text.matches("<|img_row_2_col_1|><image>").count(), 1);
    assert!(!text.contains("thumbnail") && text.ends_with("<image><|image_end|>"));
}
