//! Archives with an image that cannot be read in the order of the stream.

use std::error::Error as StdError;
use std::io;

use holdfast_archive::Error as ArchiveError;
use holdfast_block::Error as DeviceError;
use holdfast_image::Error as ImageError;

use crate::job::Error;

/// Whether an archive has an image that must be stored before it can be read: see [`StreamImages`](holdfast_archive::StreamImages).
pub fn wants_stored_images(error: &(dyn StdError + 'static)) -> bool {
    error
        .downcast_ref::<ImageError>()
        .is_some_and(|error| matches!(error, ImageError::NotInOrder { .. }))
        || made_of(error).is_some_and(wants_stored_images)
}

/// The cause of an error. Transparent errors and I/O errors do not return it as their source.
fn made_of<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)> {
    if let Some(error) = error.downcast_ref::<io::Error>() {
        let held = error.get_ref();
        return held.map(|held| held as &(dyn StdError + 'static));
    }
    match error.downcast_ref::<Error>() {
        Some(Error::Archive(inner)) => return Some(inner),
        Some(Error::Image(inner)) => return Some(inner),
        Some(Error::Device(inner)) => return Some(inner),
        Some(Error::Repository(inner)) => return Some(inner),
        _ => {}
    }
    match error.downcast_ref::<ArchiveError>() {
        Some(ArchiveError::Image(inner)) => return Some(inner),
        Some(ArchiveError::Device(inner)) => return Some(inner),
        _ => {}
    }
    if let Some(ImageError::Device(inner)) = error.downcast_ref::<ImageError>() {
        return Some(inner);
    }
    if let Some(DeviceError::Layer(inner)) = error.downcast_ref::<DeviceError>() {
        return Some(&**inner);
    }
    error.source()
}

#[cfg(test)]
mod tests {
    use holdfast_archive::Error as ArchiveError;
    use holdfast_block::Error as DeviceError;
    use holdfast_image::Error as ImageError;

    use super::wants_stored_images;
    use crate::job::Error;

    #[test]
    fn the_error_is_found_however_it_is_wrapped() {
        let order = || ImageError::NotInOrder {
            image: "d.vmdk".to_owned(),
            detail: "it goes back".to_owned(),
        };
        let of_device = || DeviceError::layer(ArchiveError::Image(order()));
        assert!(wants_stored_images(&Error::Archive(ArchiveError::Image(order()))));
        assert!(wants_stored_images(&Error::Device(of_device())));
        assert!(wants_stored_images(&Error::Image(ImageError::Device(of_device()))));
        let held = std::io::Error::other(Error::Device(of_device()));
        assert!(wants_stored_images(&Error::Device(DeviceError::io("read", 7, held))));
        let other = std::io::Error::other("another one");
        assert!(!wants_stored_images(&Error::Device(DeviceError::io("read", 7, other))));
    }
}
