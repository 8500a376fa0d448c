//! [`ImageFolder`]: PNG and JPEG files, a class per folder.

use std::path::{Path, PathBuf};

use image::imageops::{FilterType, resize};
use image::{DynamicImage, ImageReader};
use phalanx_parallel::Content;
use phalanx_tensor::Tensor;

use super::dataset::{in_memory, in_range};
use super::{Dataset, HOST, wrong};
use crate::{Error, Result};

/// What a pixel has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Color {
    /// Red, green and blue. Transparency is dropped.
    #[default]
    Rgb,
    /// Luminance.
    Gray,
}

impl Color {
    /// Channels of a pixel.
    pub fn channels(self) -> usize {
        match self {
            Color::Rgb => 3,
            Color::Gray => 1,
        }
    }
}

/// The decoding of an [`ImageFolder`]. By default: RGB, values from 0 to 1.
#[derive(Clone, Debug)]
#[must_use = "it opens nothing before `open`"]
pub struct ImageFolderConfig {
    height: u32,
    width: u32,
    color: Color,
    /// The mean that is subtracted from each channel, and the deviation by which it is then divided.
    normalization: Option<(Vec<f32>, Vec<f32>)>,
}

impl ImageFolderConfig {
    /// Resizes images to this height and width in pixels, whatever their own proportions are.
    pub fn new(height: u32, width: u32) -> ImageFolderConfig {
        ImageFolderConfig { height, width, color: Color::Rgb, normalization: None }
    }

    /// Converts images to this.
    pub fn with_color(self, color: Color) -> ImageFolderConfig {
        ImageFolderConfig { color, ..self }
    }

    /// Subtracts `mean` from each channel, and divides by `std`.
    pub fn with_normalization(self, mean: &[f32], std: &[f32]) -> ImageFolderConfig {
        ImageFolderConfig { normalization: Some((mean.to_vec(), std.to_vec())), ..self }
    }

    /// Lists the images of a folder. Each of its subfolders is a class, whose images are all `.png`, `.jpg` and `.jpeg` files in and
    /// below it. Names that begin with a dot are passed over.
    ///
    /// # Errors
    /// If a size is 0, the normalization does not fit the channels, the folder cannot be listed, has no subfolders, or a class is empty.
    pub fn open(self, root: impl AsRef<Path>) -> Result<ImageFolder> {
        let root = root.as_ref();
        self.check()?;
        let folders = list(root)?.into_iter().filter(|path| path.is_dir());
        let (mut classes, mut files) = (Vec::new(), Vec::new());
        for folder in folders {
            let before = files.len();
            collect(&folder, classes.len(), &mut files)?;
            if files.len() == before {
                return Err(wrong(
                    folder.display(),
                    "got a class without images, wanted a .png, .jpg or .jpeg file in it",
                ));
            }
            classes.push(folder.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
        match classes.is_empty() {
            true => Err(wrong(root.display(), "got no folders in it, wanted one for each class")),
            false => Ok(ImageFolder { config: self, classes, files }),
        }
    }

    fn check(&self) -> Result<()> {
        let refuse = |why: String| Err(wrong("ImageFolder", why));
        if self.height == 0 || self.width == 0 {
            return refuse(format!(
                "got images of {} x {} pixels, wanted at least one",
                self.height, self.width
            ));
        }
        let channels = self.color.channels();
        match &self.normalization {
            Some((mean, std)) if mean.len() != channels || std.len() != channels => refuse(format!(
                "got a mean and std of {} and {} channels, wanted {channels}",
                mean.len(),
                std.len()
            )),
            Some((_, std)) if std.iter().any(|&s| s == 0.0 || !s.is_finite()) => {
                refuse(format!("got a std of {std:?}, wanted finite numbers other than 0"))
            }
            _ => Ok(()),
        }
    }
}

/// Images by class. An item is the image `[channels, height, width]` f32 and its class, an i64 scalar. Files are listed once, and
/// decoded when an item is read.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    config: ImageFolderConfig,
    classes: Vec<String>,
    /// Each with its class.
    files: Vec<(PathBuf, usize)>,
}

impl ImageFolder {
    /// The names of the classes by their number: the subfolders' in sorted order.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The file of an item, and its class.
    ///
    /// # Errors
    /// If there is no such item.
    pub fn file(&self, index: usize) -> Result<(&Path, usize)> {
        in_range("ImageFolder", index, self.files.len())?;
        let (path, class) = &self.files[index];
        Ok((path, *class))
    }

    /// The channels of an image, one after the other.
    fn planes(&self, image: &DynamicImage) -> Vec<f32> {
        let (width, height) = (self.config.width, self.config.height);
        let pixels = match self.config.color {
            Color::Rgb => resized(image.to_rgb8(), width, height),
            Color::Gray => resized(image.to_luma8(), width, height),
        };
        let channels = self.config.color.channels();
        let plane = |channel: usize| {
            let (mean, std) = match &self.config.normalization {
                Some((mean, std)) => (mean[channel], std[channel]),
                None => (0.0, 1.0),
            };
            pixels
                .iter()
                .skip(channel)
                .step_by(channels)
                .map(move |&value| (f32::from(value) / 255.0 - mean) / std)
        };
        (0..channels).flat_map(plane).collect()
    }
}

/// The bytes of an image of this size.
fn resized<P>(image: image::ImageBuffer<P, Vec<u8>>, width: u32, height: u32) -> Vec<u8>
where
    P: image::Pixel<Subpixel = u8> + 'static,
{
    match image.dimensions() == (width, height) {
        true => image.into_raw(),
        false => resize(&image, width, height, FilterType::Triangle).into_raw(),
    }
}

impl Dataset for ImageFolder {
    /// The names and sizes of the files. Pictures are too many to be read before the first step.
    fn contents(&self) -> Vec<Content> {
        let of = |(path, class): &(PathBuf, usize)| {
            let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
            format!("{:?} {class} {bytes};", path.file_name()).into_bytes()
        };
        vec![in_memory(self.files.iter().flat_map(of))]
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn item(&self, index: usize, _draw: u64) -> Result<Vec<Tensor>> {
        let (path, class) = self.file(index)?;
        let unreadable =
            |e: &dyn std::fmt::Display| wrong(path.display(), format!("got no image that can be read: {e}"));
        let reader = ImageReader::open(path).and_then(ImageReader::with_guessed_format);
        let image = reader.map_err(|e| unreadable(&e))?.decode().map_err(|e| unreadable(&e))?;
        let shape = [self.config.color.channels(), self.config.height as usize, self.config.width as usize];
        let image = Tensor::from_vec(self.planes(&image), &shape, HOST)?;
        Ok(vec![image, Tensor::scalar(class as i64, HOST)?])
    }
}

/// The entries of a folder, sorted by name.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let refuse = |e: std::io::Error| -> Error { wrong(folder.display(), e) };
    let entries = std::fs::read_dir(folder).map_err(refuse)?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<std::io::Result<Vec<PathBuf>>>().map_err(refuse)?;
    let hidden =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    paths.retain(|path| !hidden(path));
    paths.sort();
    Ok(paths)
}

/// Appends the images in and below a folder.
fn collect(folder: &Path, class: usize, files: &mut Vec<(PathBuf, usize)>) -> Result<()> {
    for path in list(folder)? {
        let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        if path.is_dir() {
            collect(&path, class, files)?;
        } else if matches!(ending.as_deref(), Some("png" | "jpg" | "jpeg")) {
            files.push((path, class));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use image::{GrayImage, ImageFormat, Luma, Rgb, RgbImage};

    use super::super::scratch::Folder;
    use super::super::{DataLoaderConfig, stack};
    use super::*;

    fn save(folder: &Folder, name: &str, image: &RgbImage, format: ImageFormat) {
        let mut bytes = std::io::Cursor::new(Vec::new());
        image.write_to(&mut bytes, format).unwrap();
        folder.file(name, bytes.into_inner());
    }

    /// Red is 51 x, green 51 y, blue 255.
    fn ramp(width: u32, height: u32) -> RgbImage {
        RgbImage::from_fn(width, height, |x, y| Rgb([51 * x as u8, 51 * y as u8, 255]))
    }

    #[test]
    fn classes_are_sorted_folders_and_an_image_is_its_channels() {
        let folder = Folder::new();
        save(&folder, "dog/b.png", &ramp(3, 2), ImageFormat::Png);
        save(&folder, "cat/deep/z.PNG", &ramp(3, 2), ImageFormat::Png);
        save(&folder, "cat/a.jpeg", &RgbImage::from_pixel(8, 8, Rgb([200, 200, 200])), ImageFormat::Jpeg);
        folder.file("cat/notes.txt", "not an image");
        folder.file(".cache/x.png", "hidden");
        folder.file("readme.png", "not in a class");
        let images = ImageFolderConfig::new(2, 3).open(&folder).unwrap();
        assert_eq!((images.len(), images.classes()), (3, &["cat".to_string(), "dog".to_string()][..]));
        let item = images.item(2, 0).unwrap();
        assert_eq!((item[0].shape(), item[1].item::<i64>().unwrap()), (&[3, 2, 3][..], 1));
        let red = [0.0, 0.2, 0.4, 0.0, 0.2, 0.4];
        let green = [0.0, 0.0, 0.0, 0.2, 0.2, 0.2];
        assert_eq!(item[0].to_vec::<f32>().unwrap(), [red, green, [1.0; 6]].concat());
        // A JPEG of one gray is that gray, at any size.
        let gray = images.item(0, 0).unwrap()[0].to_vec::<f32>().unwrap();
        assert!(gray.iter().all(|value| (value - 200.0 / 255.0).abs() < 0.01), "{gray:?}");
        assert!(images.file(1).unwrap().0.ends_with("cat/deep/z.PNG"));
        assert!(images.item(3, 0).unwrap_err().to_string().contains("got item 3, wanted one of 3"));
        let batch = stack((0..3).map(|i| images.item(i, 0).unwrap()).collect()).unwrap();
        assert_eq!((batch[0].shape(), batch[1].to_vec::<i64>().unwrap()), (&[3, 3, 2, 3][..], vec![0, 0, 1]));
    }

    #[test]
    fn images_are_resized_converted_and_normalized() {
        let folder = Folder::new();
        let halves =
            RgbImage::from_fn(8, 4, |x, _| if x < 4 { Rgb([0, 0, 0]) } else { Rgb([255, 255, 255]) });
        save(&folder, "a/x.png", &halves, ImageFormat::Png);
        let config = ImageFolderConfig::new(1, 2).with_color(Color::Gray);
        let gray = config.clone().open(&folder).unwrap().item(0, 0).unwrap().remove(0);
        assert_eq!(gray.shape(), [1, 1, 2]);
        let gray = gray.to_vec::<f32>().unwrap();
        assert!(gray[0] < 0.2 && gray[1] > 0.8 && (gray[0] + gray[1] - 1.0).abs() < 0.02, "{gray:?}");
        let normal =
            config.with_normalization(&[0.5], &[0.25]).open(&folder).unwrap().item(0, 0).unwrap().remove(0);
        let wanted: Vec<f32> = gray.iter().map(|value| (value - 0.5) / 0.25).collect();
        assert_eq!(normal.to_vec::<f32>().unwrap(), wanted);
        // A gray file becomes three equal channels.
        GrayImage::from_pixel(2, 2, Luma([51])).save(folder.path("a/x.png")).unwrap();
        let rgb = ImageFolderConfig::new(2, 2).open(&folder).unwrap().item(0, 0).unwrap().remove(0);
        assert_eq!(rgb.to_vec::<f32>().unwrap(), [0.2; 12]);
    }

    #[test]
    fn what_is_no_image_is_an_error_of_its_step_that_names_the_file() {
        let folder = Folder::new();
        save(&folder, "a/1.png", &ramp(2, 2), ImageFormat::Png);
        folder.file("a/2.png", b"\x89PNG\r\n\x1a\nbroken");
        folder.file("a/3.png", b"nothing");
        let images = ImageFolderConfig::new(2, 2).open(&folder).unwrap();
        for (item, name) in [(1, "2.png"), (2, "3.png")] {
            let error = images.item(item, 0).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}: got no image that can be read: ")), "{error}");
        }
        let mut loader = DataLoaderConfig::new(1).evaluate(images).unwrap();
        assert!(loader.next_step().is_ok());
        let error = loader.next_step().unwrap_err().to_string();
        assert!(error.starts_with("item 1 in epoch 0: ") && error.contains("2.png"), "{error}");
    }

    #[test]
    fn empty_folders_and_settings_that_make_no_sense_are_refused() {
        let folder = Folder::new();
        let error = |config: ImageFolderConfig| config.open(&folder).err().unwrap().to_string();
        let config = || ImageFolderConfig::new(2, 2);
        assert!(error(config()).contains("got no folders in it, wanted one for each class"));
        folder.file("a/x.txt", "");
        assert!(error(config()).contains("a: got a class without images"));
        assert!(error(ImageFolderConfig::new(0, 2)).contains("got images of 0 x 2 pixels"));
        assert!(error(config().with_normalization(&[0.5], &[0.5])).contains("of 1 and 1 channels, wanted 3"));
        let zero = config().with_color(Color::Gray).with_normalization(&[0.5], &[0.0]);
        assert!(error(zero).contains("got a std of [0.0]"));
        let missing = config().open(folder.path("none")).err().unwrap().to_string();
        assert!(missing.contains("none: "), "{missing}");
    }
}
