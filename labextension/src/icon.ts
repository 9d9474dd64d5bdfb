/**
 * The icon of the panel: one bar alone between two pairs that stand back.
 */

import { LabIcon } from '@jupyterlab/ui-components';

export const krexIcon = new LabIcon({
  name: 'krex-jupyter:krex',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 16 16">
  <g class="jp-icon3" fill="#616161">
    <rect x="7" y="1" width="2" height="14" rx="1"/>
    <rect x="3.6" y="5" width="1.6" height="6" rx="0.8" opacity="0.6"/>
    <rect x="0.8" y="5" width="1.6" height="6" rx="0.8" opacity="0.6"/>
    <rect x="10.8" y="5" width="1.6" height="6" rx="0.8" opacity="0.6"/>
    <rect x="13.6" y="5" width="1.6" height="6" rx="0.8" opacity="0.6"/>
  </g>
</svg>`
});
